"""Sweeps leave Redis to others: how many of their calls travel together follows what these take."""

import asyncio

import pytest
from support.runs.stored_runs import Bench, plain_agent

from stepfleet.orchestrator import AsyncFleet
from stepfleet.orchestrator.store import pace
from stepfleet.orchestrator.store.pace import SweepPace, in_groups

BENCH = {"agent": plain_agent()}
BUSY = "local sum = 0 for i = 1, 2000000 do sum = sum + i end return sum"


def looks(desk: Bench, count: int) -> list[tuple[object, ...]]:
    """Return calls that change nothing: no such run has ended."""
    return [
        ("purge", [desk.opened.keys.run(f"r{n}"), desk.opened.keys.due(0)], f"r{n}", " ", 0, "", "")
        for n in range(count)
    ]


async def test_the_time_of_calls_is_that_of_redis(desk: Bench) -> None:
    connection = desk.opened.connection
    replies, little = await connection.timed(("PING",), ("NONSENSE",))
    assert replies[0] is True
    assert isinstance(replies[1], Exception)
    [reply], much = await connection.timed(("EVAL", BUSY, 0))
    assert reply == 2000001000000
    assert much > max(little, 0.001)


async def test_groups_grow_while_redis_is_quick(
    desk: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "TARGET_SECONDS", 1000.0)
    own, sizes = SweepPace(desk.opened.connection), list[int]()
    for group in own.groups(looks(desk, 2000)):
        assert await own.send(group) == [0] * len(group)
        sizes.append(len(group))
    assert sizes == [16, 32, 64, 128, 256, 500, 500, 500, 4]


async def test_groups_shrink_to_one_call_where_that_is_all_redis_has_time_for(
    desk: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "TARGET_SECONDS", 0.0)
    own, sizes = SweepPace(desk.opened.connection), list[int]()
    for group in own.groups(looks(desk, 20)):
        assert await own.send(group) == [0] * len(group)
        sizes.append(len(group))
    assert sizes == [16, 1, 1, 1, 1]


async def test_calls_are_made_again_where_the_server_has_lost_the_scripts(desk: Bench) -> None:
    await desk.opened.connection.execute("SCRIPT", "FLUSH")
    assert await SweepPace(desk.opened.connection).send(looks(desk, 3)) == [0, 0, 0]


async def test_a_sweep_of_a_batch_goes_by_its_pace(
    desk: Bench, fleet: AsyncFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests to batches, retries and purges reach every run, however small a group."""
    monkeypatch.setattr(pace, "TARGET_SECONDS", 0.0)
    batch = await fleet.submit_batch(({"input": f"q{n}"} for n in range(60)), plain_agent())
    assert await batch.pause() == 60
    assert await batch.resume() == 60
    assert await batch.cancel() == 60
    assert await batch.retry(failed_only=False) == 60
    assert await batch.cancel() == 60
    assert await fleet.runs.purge(batch=batch.id) == 60


async def test_a_bounded_number_of_calls_is_under_way_in_groups() -> None:
    under_way, most = 0, 0

    async def call(item: int) -> int:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        return 2 * item

    assert await in_groups(range(100), call) == [2 * item for item in range(100)]
    assert most == pace.AT_ONCE
