"""A feed whose page an sink never takes: the others of the same sink go on."""

import asyncio
from collections.abc import Sequence

from support.runs.stored_runs import bench

from stepfleet.orchestrator.events.subscribers import Envelope
from stepfleet.worker.events.delivery import EventDelivery, Sink
from stepfleet.worker.events.subscribers import EventFilter


async def test_a_page_that_is_never_taken_holds_up_no_other_shard(redis_url: str) -> None:
    async with bench(redis_url, lease=600.0, grace=60) as desk:
        opened = desk.opened
        feeds = opened.feeds
        await feeds.switch_on()
        refused, taken = await desk.create(), await desk.create()
        while opened.keys.shard_of(taken) == opened.keys.shard_of(refused):
            taken = await desk.create()
        heard: list[str] = []

        async def deliver(envelopes: Sequence[Envelope]) -> None:
            if any(one["session_id"] == refused for one in envelopes):
                raise OSError("not this one")
            heard.extend(str(one["session_id"]) for one in envelopes)

        async def close() -> None:
            return None

        chosen = EventFilter(opened).broadcast
        sink = Sink("hook", deliver, close)
        one = EventDelivery(sink, feeds, chosen, "one", jitter=lambda: 0.5, first_wait=60.0)
        async with asyncio.timeout(30):  # half of the first wait
            await one.round()
            before = heard.count(taken)
            assert before
            await desk.claim(taken)
            await one.round()
        assert heard.count(taken) > before
        assert refused not in heard
