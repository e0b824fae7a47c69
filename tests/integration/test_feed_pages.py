"""Active runs join a feed that is switched on: a page at a time, each once, whoever goes on."""

import asyncio
from typing import Any

from stored_runs import Bench, bench

from stepfleet.orchestrator.store.calls import run_script
from stepfleet.orchestrator.store.feeds import Feeds

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
        await Feeds(desk.opened.connection, desk.opened.keys).switch_on()
        assert sorted(await fed(desk)) == sorted(runs)
        left = await desk.opened.connection.execute("KEYS", "*feed:[jp]*")
        assert left == []


async def test_a_run_with_a_long_history_joins_whole(redis_url: str) -> None:
    """What a run has told is fed at once, so that it keeps its order beside what follows."""
    async with bench(redis_url, shards=1, lease=600.0, grace=60) as desk:
        run_id = await desk.create()
        events = f"{desk.opened.keys.run(run_id)}:events"
        await desk.opened.connection.execute_all(
            *(("XADD", events, "*", "first", at, "events", "[]") for at in range(2, 100))
        )
        assert await page(desk) == (1, 0)
        assert await fed(desk) == [run_id] * 99
