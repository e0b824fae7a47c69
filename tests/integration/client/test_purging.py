"""Ended runs are removed by age, status and batch, also from a Redis that takes no writes."""

from collections.abc import Callable
from typing import Any

import pytest
from support.runs.stored_runs import Bench, answered, bench, failed
from support.servers.redis_servers import RedisServer

from stepfleet.orchestrator import AsyncFleet, ConfigurationError, Lifecycle
from stepfleet.orchestrator.store.runs.control import PAGE

BENCH: dict[str, Any] = {"lease": 600.0, "grace": 60}


async def ended(desk: Bench, *, well: bool = True, batch: str = "") -> str:
    """Return a run that has ended."""
    run_id = await desk.create(batch=batch)
    claim = await desk.claim(run_id)
    await desk.commit(claim, answered(claim) if well else failed(claim))
    assert (await desk.stored(run_id)).state.status.is_terminal
    return run_id


async def left(desk: Bench, run_id: str) -> list[str]:
    """Return the names of what is kept of a run."""
    keys = desk.opened.keys.run(run_id)
    parts = ("", ":log", ":journal", ":outcomes", ":lost", ":events")
    there = [await desk.opened.connection.execute("EXISTS", f"{keys}{part}") for part in parts]
    return [part for part, is_there in zip(parts, there, strict=True) if is_there]


async def test_every_ended_run_goes_and_open_ones_stay(desk: Bench, fleet: AsyncFleet) -> None:
    gone = [await ended(desk), await ended(desk, well=False)]
    kept = [await desk.create(), await desk.create()]
    await desk.claim(kept[0])
    await fleet.runs.pause(kept[1])
    assert await fleet.runs.purge(dry_run=True) == len(gone)
    assert all([await left(desk, run_id) for run_id in gone])
    told: list[int] = []
    assert await fleet.runs.purge(on_progress=told.append) == len(gone)
    assert told[-1] == len(gone)
    assert [await left(desk, run_id) for run_id in gone] == [[], []]
    assert (await desk.stored(kept[0])).state.status is Lifecycle.IN_PROGRESS
    assert (await desk.stored(kept[1])).state.status is Lifecycle.PAUSED
    assert await fleet.runs.purge() == 0


async def test_runs_are_chosen_by_status_and_age(desk: Bench, fleet: AsyncFleet) -> None:
    good, bad = await ended(desk), await ended(desk, well=False)
    long_ago = await ended(desk)
    await desk.opened.connection.execute("HSET", desk.opened.keys.run(long_ago), "ended", 1000)
    assert await fleet.runs.purge(older_than=3600) == 1
    assert await left(desk, long_ago) == []
    status = (await desk.stored(bad)).state.status.value
    assert await fleet.runs.purge(statuses=[status]) == 1
    assert await left(desk, bad) == []
    assert (await desk.stored(good)).result().output == "fine"


async def test_a_batch_that_is_purged_whole_is_forgotten_and_others_stay(
    desk: Bench, fleet: AsyncFleet
) -> None:
    lines = [{"id": str(n), "input": "x"} for n in range(3)]
    batches = [await fleet.submit_batch(lines, agent=desk.agent, name=str(n)) for n in range(2)]
    batches.append(await fleet.submit_batch(lines, agent=desk.agent, idempotency_key="of its own"))
    for batch in batches[1:]:
        await batch.cancel()
    first, *_, last = batches
    assert (await last.progress()).done == len(lines)
    assert await fleet.runs.purge(batch=last.id, statuses=["completed"]) == 0
    assert await fleet.runs.purge(batch=last.id) == len(lines)
    names = await desk.opened.connection.execute("KEYS", f"*{last.id}*")
    assert names == []
    with pytest.raises(ConfigurationError):
        await fleet.runs.purge(batch=last.id)
    if first.id != last.id:
        assert (await first.progress()).total == len(lines)


async def test_a_full_redis_can_be_purged(own_redis: Callable[..., RedisServer]) -> None:
    server = own_redis()
    async with bench(server.url, lease=600.0, grace=60) as desk:
        gone = [await ended(desk) for _ in range(3)]
        await desk.opened.connection.execute("SCRIPT", "FLUSH")
        await desk.opened.connection.execute("CONFIG", "SET", "maxmemory", 1)
        async with AsyncFleet(server.url) as fleet:
            assert await fleet.runs.purge() == len(gone)
        assert [await left(desk, run_id) for run_id in gone] == [[]] * len(gone)


async def test_more_runs_than_a_page_go_page_by_page(desk: Bench, fleet: AsyncFleet) -> None:
    for place in range(PAGE + 50):
        key = desk.opened.keys.run(f"r{place}")
        fields = ("status", "completed", "ended", 1, "batch", "")
        await desk.opened.connection.execute("HSET", key, *fields)
    told: list[int] = []
    assert await fleet.runs.purge(on_progress=told.append) == PAGE + 50
    assert told == sorted(told)
    assert len(told) > 1


@pytest.mark.parametrize("wrong", [{"statuses": ["done"]}, {"older_than": -1.0}, {"batch": "b"}])
async def test_what_cannot_be_meant_is_refused(fleet: AsyncFleet, wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        await fleet.runs.purge(**wrong)  # type: ignore[arg-type]
