"""Events out of the fleet: to signed webhooks and channels, in order, none lost, no step slowed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError
from support.deadlines import until
from support.runs.scripted_steps import Script, call, say
from support.runs.stored_runs import Bench, answered, bench, called
from support.runs.tools import look
from support.servers.redis_servers import RedisServer, free_port
from support.servers.trouble_proxy import troubled
from support.servers.webhook_receiver import Receiver

from stepfleet.orchestrator import Agent, AsyncFleet, Subscribers
from stepfleet.orchestrator.events.broadcast import RedisPubSub, Webhook
from stepfleet.orchestrator.events.envelope import channel_of
from stepfleet.orchestrator.events.subscribers import CanBroadcastAgentEvents, InProcess
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store.feeds import Feeds
from stepfleet.worker.events.delivery import EventDelivery, Sink
from stepfleet.worker.events.subscribers import EventFilter, sinks_of
from stepfleet.worker.runtime.inline import InlineWorker

# An sink that was away is tried again after up to as long as it was away, and a quarter of it.
LONG = 180.0
takes_long = pytest.mark.timeout(600)


def looker(**config: Any) -> Agent:
    answers = [call(("look", {"what": "a"}), text="Looking."), say("It is there.")]
    return Agent("looker", model=Script(answers), tools=[look], **config)


def feeds_of(desk: Bench) -> Feeds:
    return desk.opened.feeds


@asynccontextmanager
async def courier(
    desk: Bench, url: str, owner: str = "one", **options: Any
) -> AsyncIterator[EventDelivery]:
    webhook = Webhook(url)
    sink = Sink("hook", webhook.deliver, webhook.aclose)
    opened = desk.opened
    chosen = EventFilter(opened).broadcast
    made = EventDelivery(
        sink, feeds_of(desk), chosen, owner, jitter=lambda: 0.5, first_wait=0.01, **options
    )
    yield made
    await made.aclose()


async def ended_run(desk: Bench) -> str:
    run_id = await desk.create()
    first = await desk.claim(run_id)
    await desk.commit(first, called(first))
    second = await desk.claim(run_id, 1)
    await desk.commit(second, answered(second))
    return run_id


async def subscribed(channel: PubSub, name: str) -> None:
    """Subscribe, and return when Redis has confirmed it: another connection may be faster."""
    await channel.subscribe(name)
    assert (await channel.get_message(timeout=LONG) or {})["type"] == "subscribe"


async def stored(desk: Bench, run_id: str) -> list[dict[str, Any]]:
    return (await desk.runs.events(run_id))[0]


def test_each_broadcaster_has_the_protocol() -> None:
    """EVT-01"""
    made = (
        InProcess(lambda _channel, _envelope: None),
        RedisPubSub.at("redis://127.0.0.1:1/0"),
        Webhook("http://127.0.0.1:1/"),
        Subscribers(),
    )
    assert all(isinstance(one, CanBroadcastAgentEvents) for one in made)


@takes_long
async def test_functions_and_channels_take_what_is_broadcast(redis_url: str) -> None:
    """EVT-01, EVT-03: plain and coroutine functions; a subscriber of the session's channel."""
    kept: list[Any] = []

    async def keep(channel: str, envelope: Any) -> None:
        kept.append((channel, envelope))

    await InProcess(keep).broadcast("agent.s", {"type": "x"})
    await InProcess(lambda *told: kept.append(told)).broadcast("agent.s", {"type": "y"})
    assert kept == [("agent.s", {"type": "x"}), ("agent.s", {"type": "y"})]
    async with Redis.from_url(redis_url) as client, client.pubsub() as channel:
        await subscribed(channel, channel_of("s"))
        broadcaster = RedisPubSub.at(redis_url)
        heard: list[Any] = []

        async def hears() -> bool:
            message = await channel.get_message(ignore_subscribe_messages=True)
            heard.extend([orjson.loads(message["data"])] if message else [])
            return bool(heard)

        await broadcaster.broadcast(channel_of("s"), {"type": "z"})
        await until(hears, within=LONG)
        await broadcaster.aclose()
    assert heard == [{"type": "z"}]


@takes_long
async def test_a_worker_posts_every_event_signed_and_in_order(redis_url: str) -> None:
    """EVT-01, EVT-20, EVT-22: as they stand in the run's own stream; the run came before it."""
    agent = looker()
    async with Receiver("a secret") as receiver, AsyncFleet(redis_url) as fleet:
        settings = load_settings(
            redis_url=redis_url, webhooks=[receiver.url], webhook_secret="a secret"
        )
        before = await fleet.submit(agent, "hi")
        async with InlineWorker(settings, [agent]) as worker:
            await worker.finish(before)
            after = await fleet.submit(agent, "hi")
            await worker.finish(after)
            for run_id in (before, after):
                events = [one async for one in fleet.runs.events(run_id, follow=True)]

                async def all_there(
                    run_id: str = run_id, events: list[dict[str, Any]] = events
                ) -> bool:
                    return receiver.of(run_id) == events

                await until(all_there, within=LONG, what="all events")


@takes_long
async def test_an_outlet_that_fails_delays_no_step_and_loses_nothing(redis_url: str) -> None:
    """EVT-20, EVT-21: the server is away while the run works; later it gets everything."""
    agent = looker()
    async with Receiver() as receiver, AsyncFleet(redis_url) as fleet:
        receiver.status = 503
        settings = load_settings(redis_url=redis_url, webhooks=[receiver.url])
        async with InlineWorker(settings, [agent]) as worker:
            run_id = await fleet.submit(agent, "hi")
            await worker.finish(run_id)
            assert (await fleet.runs.result(run_id)).success
            assert receiver.taken == []
            receiver.status = 200
            events = [one async for one in fleet.runs.events(run_id, follow=True)]

            async def all_there() -> bool:
                return receiver.of(run_id) == events

            await until(all_there, within=LONG)


@takes_long
@pytest.mark.parametrize("trouble", ["cut", "stall"])
async def test_channels_on_a_redis_that_is_away_delay_no_step(
    redis_url: str, own_redis: Any, trouble: str
) -> None:
    """EVT-20: pub/sub is down; when it is back, its subscribers hear of the run.

    Away for the worker alone: what is told before the subscriber is there, nobody tells it again.
    """
    events_server: RedisServer = own_redis()
    agent = looker()
    with troubled(events_server.port) as way:
        getattr(way, trouble)()
        settings = load_settings(redis_url=redis_url, events_url=way.url)
        async with AsyncFleet(redis_url) as fleet, InlineWorker(settings, [agent]) as worker:
            run_id = await fleet.submit(agent, "hi")
            await worker.finish(run_id)
            assert (await fleet.runs.result(run_id)).success
            async with Redis.from_url(events_server.url) as client, client.pubsub() as channel:
                await subscribed(channel, channel_of(run_id))
                way.heal()
                heard: list[dict[str, Any]] = []

                async def ended() -> bool:
                    message = await channel.get_message(ignore_subscribe_messages=True)
                    heard.extend([orjson.loads(message["data"])] if message else [])
                    return bool(heard) and heard[-1]["payload"].get("status") == "completed"

                await until(ended, within=LONG)
            events = [one async for one in fleet.runs.events(run_id, follow=True)]
    assert heard[-len(events) :] == events


async def test_a_cluster_of_channels_that_is_away_is_an_error_of_redis() -> None:
    """The courier retries those; the cluster client's own exception would end it."""
    channels = RedisPubSub.at(f"redis+cluster://127.0.0.1:{free_port()}")
    try:
        with pytest.raises(RedisError, match="cannot be connected"):
            await channels.broadcast("agent.run", {"sequence": 1})
    finally:
        await channels.aclose()


async def test_a_dead_owners_work_is_taken_over_where_it_stopped(desk: Bench) -> None:
    """EVT-19, EVT-20: what was delivered and not noted comes twice under the same id."""
    await feeds_of(desk).switch_on()
    run_id = await ended_run(desk)
    async with (
        Receiver() as receiver,
        courier(desk, receiver.url, "one") as first,
        courier(desk, receiver.url, "two") as second,
    ):
        pages = await feeds_of(desk).read(
            await feeds_of(desk).own("hook", "one", 60) or {}, most=100
        )
        dead = Webhook(receiver.url)
        await dead.deliver([one for page in pages for one in page.envelopes])
        await dead.aclose()
        assert await second.round() is None
        await feeds_of(desk).disown("hook", "one")
        assert await second.round() == len(await stored(desk, run_id))
        assert await first.round() is None
        assert receiver.of(run_id) == await stored(desk, run_id)
        assert receiver.repeated() == len(await stored(desk, run_id))
        assert await second.round() == 0
        await feeds_of(desk).disown("hook", "two")
        assert await first.round() == 0


async def test_what_is_refused_for_good_is_left_out_and_counted(desk: Bench) -> None:
    """EVT-20: after some tries, so that one bad page does not hold all others back."""
    await feeds_of(desk).switch_on()
    run_id = await ended_run(desk)
    async with Receiver() as receiver, courier(desk, receiver.url, refusals=3) as one:
        receiver.status = 400
        assert [await one.round() for _ in range(2)] == [0, 0]
        assert await feeds_of(desk).lost("hook") == 0
        await one.round()
        assert receiver.requests == 3
        writes = await desk.opened.connection.execute(
            "XLEN", f"{desk.opened.keys.run(run_id)}:events"
        )
        assert await feeds_of(desk).lost("hook") == writes
        receiver.status = 200
        other = await ended_run(desk)
        await one.round()
        assert receiver.of(run_id) == []
        assert receiver.of(other) == await stored(desk, other)


async def test_what_is_trimmed_before_it_was_delivered_is_counted(desk: Bench) -> None:
    """EVT-20: the feed is bounded; an sink that stands still too long learns what it missed."""
    await feeds_of(desk).switch_on()
    run_id = await ended_run(desk)
    keys = desk.opened.keys
    feed = f"{keys.tag(keys.shard_of(run_id))}feed"
    writes = await desk.opened.connection.execute("XLEN", feed)
    await desk.opened.connection.execute("XTRIM", feed, "MAXLEN", "=", 1)
    async with Receiver() as receiver, courier(desk, receiver.url) as one:
        await one.round()
        assert [event["payload"].get("status") for event in receiver.taken][-1] == "completed"
    assert await feeds_of(desk).lost("hook") == writes - 1


async def test_a_run_without_status_tracking_keeps_its_statuses_to_itself(redis_url: str) -> None:
    """EVT-23: they stay in its record and are not broadcast."""
    quiet = looker(broadcast={"auto_status_tracking": False})
    async with bench(redis_url, quiet) as desk:
        await feeds_of(desk).switch_on()
        run_id = await ended_run(desk)
        async with Receiver() as receiver, courier(desk, receiver.url) as one:
            await one.round()
            types = {event["type"] for event in receiver.of(run_id)}
        assert "agent.status" not in types
        assert "agent.step.completed" in types
        assert "agent.status" in {event["type"] for event in await stored(desk, run_id)}


async def test_nothing_is_fed_where_nobody_broadcasts(desk: Bench) -> None:
    """EVT-20: no setting, no feed, no mark on the run."""
    run_id = await ended_run(desk)
    found = await desk.opened.connection.execute("KEYS", "*feed*")
    assert found == []
    assert "feed" not in await desk.header(run_id)


def test_outlets_never_show_their_address() -> None:
    """EVT-24: names tell the kind and a digest; addresses may hold tokens."""
    settings = load_settings(
        redis_url="redis://h/0", webhooks=["https://user:pass@h/x"], events_url="redis://:pw@e/0"
    )
    names = [one.name for one in sinks_of(settings)]
    assert [name.partition("-")[0] for name in names] == ["webhook", "channels"]
    assert not any(secret in name for name in names for secret in ("pass", "pw", "user"))


@takes_long
async def test_two_workers_deliver_each_event_once_while_none_dies(redis_url: str) -> None:
    """EVT-19: one owner at a time."""
    agent = looker()
    async with Receiver() as receiver, AsyncFleet(redis_url) as fleet:
        settings = load_settings(redis_url=redis_url, webhooks=[receiver.url])
        async with InlineWorker(settings, [agent]) as one, InlineWorker(settings, [agent]) as two:
            run_ids = [await fleet.submit(agent, "hi") for _ in range(6)]
            await asyncio.gather(one.finish(*run_ids[:3]), two.finish(*run_ids[3:]))

            async def all_ended() -> bool:
                ends = [
                    event
                    for event in receiver.taken
                    if event["payload"].get("status") == "completed"
                ]
                return len(ends) >= len(run_ids)

            await until(all_ended, within=LONG)
    assert receiver.repeated() == 0
    for run_id in run_ids:
        numbers = [event["sequence"] for event in receiver.of(run_id)]
        assert numbers == list(range(1, len(numbers) + 1))
