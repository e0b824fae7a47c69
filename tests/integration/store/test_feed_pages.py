"""Active runs join a feed that is switched on: a page at a time, each once, whoever goes on."""

import asyncio
from typing import Any

from support.runs.stored_runs import Bench, bench

from stepfleet.orchestrator.store.lua import run_script

RUNS = 450
PAGE = 20


async def page(desk: Bench, most: int = PAGE) -> tuple[int, int]:
    """Let one page of the shard's runs join."""
    due = [desk.opened.keys.due(0)]
    joined, more = await run_script(desk.opened.connection, "feed", due, 600, most)
    return joined, more


async def fed(desk: Bench) -> list[str]:
    """Return the runs that the feed points to, one entry for each of their writes."""
    found = await desk.opened.connection.execute("XRANGE", "sf:{s00}:feed", "-", "+")
    return [_fields(entry[1])["run"] for entry in found]


def _fields(raw: Any) -> dict[str, str]:
    return dict(raw) if isinstance(raw, dict) else dict(zip(raw[::2], raw[1::2], strict=True))


async def test_runs_join_in_pages_each_once_while_others_begin(redis_url: str) -> None:
    """No call takes more than its page, whoever makes it; runs that begin join alone."""
    async with bench(redis_url, shards=1, lease=600.0, grace=60) as desk:
        before = await asyncio.gather(*(desk.create() for _ in range(RUNS)))
        calls, begun = 0, []
        while (step := await page(desk))[1]:
            assert step[0] <= PAGE
            calls += 1
            if calls % 5 == 0:
                begun.append(await desk.create())
        assert calls >= RUNS // PAGE
        assert begun
        told = await fed(desk)
        assert sorted(told) == sorted([*before, *begun])  # each has told that it is queued
        assert await page(desk) == (0, 0)


async def test_whoever_switches_on_again_goes_on_where_another_stopped(redis_url: str) -> None:
    async with bench(redis_url, shards=1, lease=600.0, grace=60) as desk:
        runs = await asyncio.gather(*(desk.create() for _ in range(RUNS)))
        assert (await page(desk))[1] == 1
        await desk.opened.feeds.switch_on()
        assert sorted(await fed(desk)) == sorted(runs)
        left = await desk.opened.connection.execute("KEYS", "*feed:[jp]*")
        assert left == []


async def test_a_run_with_a_long_history_joins_in_pages_and_in_its_order(redis_url: str) -> None:
    """no call copies all that it has told; what it tells meanwhile comes behind, once."""
    async with bench(redis_url, shards=1, lease=600.0, grace=60) as desk:
        run_id = await desk.create()
        events = f"{desk.opened.keys.run(run_id)}:events"
        add = ("XADD", events, "*", "first")
        await desk.opened.connection.execute_all(
            *((*add, at, "events", "[]") for at in range(2, 100))
        )
        assert await page(desk) == (0, 1)
        await desk.opened.connection.execute(*add, 100, "events", "[]")
        calls = 1
        while (await page(desk))[1]:
            calls += 1
        assert calls >= 100 / (PAGE + 10)
        assert await fed(desk) == [run_id] * 100
        assert await places(desk) == await ids(desk, events)
        assert await page(desk) == (0, 0)


async def test_large_events_are_copied_a_few_at_a_time(redis_url: str) -> None:
    async with bench(redis_url, shards=1, lease=600.0, grace=60) as desk:
        run_id = await desk.create()
        events = f"{desk.opened.keys.run(run_id)}:events"
        for at in range(2, 40):
            await desk.opened.connection.execute(
                "XADD", events, "*", "first", at, "events", "x" * 100_000
            )
        assert await page(desk, 1000) == (0, 1)
        assert len(await fed(desk)) <= 10
        await desk.opened.feeds.switch_on()
        assert await places(desk) == await ids(desk, events)


async def places(desk: Bench) -> list[str]:
    """Return the entries of runs that the feed points to, in its order."""
    found = await desk.opened.connection.execute("XRANGE", "sf:{s00}:feed", "-", "+")
    return [_fields(entry[1])["at"] for entry in found]


async def ids(desk: Bench, stream: str) -> list[str]:
    """Return the ids of a stream's entries."""
    return [entry[0] for entry in await desk.opened.connection.execute("XRANGE", stream, "-", "+")]
