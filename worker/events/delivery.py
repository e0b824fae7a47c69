"""Delivers the events of the feeds to one sink: in order, at least once, by one worker at a time.

Runs in the background, never in a step. A sink that is slow or away delays no other; the events
that it missed are delivered when it is back, by the worker that owns it then.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError

from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.events.broadcast import WebhookError
from stepfleet.orchestrator.events.subscribers import Envelope
from stepfleet.orchestrator.store.feeds import FeedPage, Feeds

log = logging.getLogger(__name__)

WRITES_AT_ONCE = 50
OWNED_SECONDS = 15.0
SHORTEST_LOOK = 0.05
LONGEST_LOOK = 0.5
FIRST_WAIT = 1.0
LONGEST_WAIT = 60.0
CLOCK_SLACK = 0.001
RENEW_SECONDS = 3600.0
MOST_REFUSALS = 8
TRY_AGAIN = -1


@dataclass(frozen=True, slots=True)
class Sink:
    """A destination of events. `deliver` raises when it fails; `name` is the sink's id.

    `live`: what runs stream is published there too, when it happens.
    """

    name: str
    deliver: Callable[[Sequence[Envelope]], Awaitable[None]]
    aclose: Callable[[], Awaitable[None]]
    live: bool = False


EnvelopeFilter = Callable[[tuple[Envelope, ...]], Awaitable[list[Envelope]]]


class EventDelivery:
    """Delivers to one sink while this worker owns it, and waits while another does.

    A page that the sink refuses for good (a 4xx answer) is tried `refusals` times, then skipped
    and counted as lost; every other page is tried until the sink accepts it.
    """

    def __init__(
        self,
        sink: Sink,
        feeds: Feeds,
        chosen: EnvelopeFilter,
        owner: str,
        *,
        jitter: Callable[[], float],
        refusals: int = MOST_REFUSALS,
        first_wait: float = FIRST_WAIT,
    ) -> None:
        self._sink = sink
        self._feeds = feeds
        self._chosen = chosen
        self._owner = owner
        self._jitter = jitter
        self._refusals = refusals
        self._first_wait = first_wait
        self._failures: dict[int, int] = {}
        self._rests: dict[int, float] = {}
        self._renew_at = 0.0

    async def watch(self) -> None:
        """Deliver until cancelled. Failures are logged, and the delivery is retried."""
        look = SHORTEST_LOOK
        while True:
            delivered = await self._look()
            look = SHORTEST_LOOK if delivered else min(look * 1.5, LONGEST_LOOK)
            await asyncio.sleep(OWNED_SECONDS / 5 if delivered is None else look)

    async def _look(self) -> int | None:
        clock = asyncio.get_running_loop().time
        try:
            if clock() >= self._renew_at:
                await self._feeds.switch_on()
                self._renew_at = clock() + RENEW_SECONDS
            return await self.round()
        except (AgentException, RedisError, OSError) as error:
            log.warning("delivery of events to %s is delayed: %s", self._sink.name, error)
        except Exception:
            log.exception("delivery of events to %s is delayed", self._sink.name)
        return None

    async def round(self) -> int | None:
        """Deliver one page of each feed; return how many envelopes, or None if not the owner.

        A feed whose page was not accepted rests for a while; the others continue.
        """
        places = await self._feeds.own(self._sink.name, self._owner, OWNED_SECONDS)
        if places is None:
            return None
        now = asyncio.get_running_loop().time() + CLOCK_SLACK
        ready = {shard: at for shard, at in places.items() if self._rests.get(shard, 0.0) <= now}
        pages = await self._feeds.read(ready, WRITES_AT_ONCE)
        if not pages:
            return 0
        refused = await asyncio.gather(*(self._deliver(page) for page in pages))
        done = [one for one in zip(pages, refused, strict=True) if one[1] != TRY_AGAIN]
        moved = {page.shard: page.place for page, _ in done}
        if moved:
            lost = sum(page.lost + count for page, count in done)
            await self._feeds.own(self._sink.name, self._owner, OWNED_SECONDS, moved, lost)
        if failed := [page.shard for page in pages if page.shard not in moved]:
            await self._rest(failed, alone=len(failed) == len(pages))
        return sum(len(page.envelopes) for page in pages if page.shard in moved)

    async def aclose(self) -> None:
        """Release the sink, so that another worker owns it at once."""
        try:
            await self._feeds.disown(self._sink.name, self._owner)
        except (AgentException, RedisError, OSError) as error:
            log.warning("%s keeps its owner until that expires: %s", self._sink.name, error)
        await self._sink.aclose()

    async def _deliver(self, page: FeedPage) -> int:
        """Deliver a page; return how many writes are lost for good, or -1 to retry."""
        try:
            envelopes = await self._chosen(page.envelopes)
            if envelopes:
                async with asyncio.timeout(OWNED_SECONDS * 0.8):
                    await self._sink.deliver(envelopes)
        except (AgentException, RedisError, OSError) as error:
            failures = self._failures[page.shard] = self._failures.get(page.shard, 0) + 1
            if failures == 1:
                log.warning("%s does not accept events: %s", self._sink.name, error)
            if not _is_lasting(error) or failures < self._refusals:
                return TRY_AGAIN
            count = len(page.envelopes)
            log.warning(
                "%s refused %d events, which are skipped: %s", self._sink.name, count, error
            )
            del self._failures[page.shard]
            return page.writes
        if self._failures.pop(page.shard, 0):
            log.warning("%s accepts events again", self._sink.name)
        return 0

    async def _rest(self, failed: Sequence[int], *, alone: bool) -> None:
        """Pause feeds before their next try; with nothing else to do, wait here."""
        waits = []
        for shard in failed:
            wait = min(self._first_wait * 2 ** min(self._failures[shard] - 1, 10), LONGEST_WAIT)
            waits.append(wait * (0.75 + self._jitter() / 2))
            self._rests[shard] = asyncio.get_running_loop().time() + waits[-1]
        if alone:
            await asyncio.sleep(min(*waits, LONGEST_LOOK))


def _is_lasting(error: Any) -> bool:
    return isinstance(error, WebhookError) and error.lasting
