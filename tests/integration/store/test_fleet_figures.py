"""The figures of the fleet that metrics show, on a real Redis."""

from collections.abc import Callable

import orjson
from support.servers.redis_servers import RedisServer

from stepfleet.orchestrator import Agent, AsyncFleet
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store.fleet.figures import fleet_figures, recent_figures
from stepfleet.orchestrator.store.keys import FIGURES
from stepfleet.orchestrator.store.store import open_store

AGENT = Agent("clerk", model="openai:m")


async def test_runs_that_nobody_takes_wait_and_are_overdue_after_the_grace(
    own_redis: Callable[..., RedisServer],
) -> None:
    settings = load_settings(redis_url=own_redis().url, grace=0.2, prefix="dev:")
    store = await open_store(settings)
    try:
        nothing = await fleet_figures(store)
        assert (nothing.queue_length, nothing.oldest_waiting_seconds) == (0, 0.0)
        assert (nothing.active, nothing.overdue, nothing.workers, nothing.refuses) == (0, 0, 0, 0)
        async with AsyncFleet(settings=settings) as fleet:
            for _ in range(3):
                await fleet.submit(AGENT, "hello")
        began = (await store.connection.read_clock()).timestamp()
        while (await fleet_figures(store)).overdue < 3:
            assert (await store.connection.read_clock()).timestamp() < began + 60
        found = await fleet_figures(store)
        assert (found.queue_length, found.active, found.overdue) == (3, 3, 3)
        assert found.oldest_waiting_seconds is not None
        assert found.oldest_waiting_seconds >= found.oldest_overdue_seconds + 0.1 > 0.1
        await store.connection.execute("RPUSH", "dev:stepfleet", "no message of ours")
        assert (await fleet_figures(store)).oldest_waiting_seconds is None
        await store.connection.execute("CONFIG", "SET", "maxmemory", "1mb")
        assert (await fleet_figures(store)).refuses == 1
    finally:
        await store.aclose()


async def test_workers_share_one_reading_of_the_figures(
    own_redis: Callable[..., RedisServer],
) -> None:
    """OPS-02: so that their cost grows with the workers, not with the square of their number."""
    settings = load_settings(redis_url=own_redis().url)
    store = await open_store(settings)
    try:
        async with AsyncFleet(settings=settings) as fleet:
            assert (await recent_figures(store)).active == 0
            await fleet.submit(AGENT, "hello")
        assert (await fleet_figures(store)).active == 1
        assert (await recent_figures(store)).active == 0
        assert 0 < await store.connection.execute("PTTL", FIGURES) <= 8000
        stored = orjson.loads(await store.connection.execute("GET", FIGURES))
        for later in ({"new": 1}, {"limits": [{"new": 1}]}):
            figures = {**stored["figures"], "overdue": 7, **later}
            text = orjson.dumps({**stored, "figures": figures}).decode()
            await store.connection.execute("SET", FIGURES, text)
            found = await recent_figures(store)
            assert (found.overdue, found.active) == ((7, 0) if "new" in later else (0, 1))
        await store.connection.execute("DEL", FIGURES)
        assert (await recent_figures(store)).active == 1
    finally:
        await store.aclose()
