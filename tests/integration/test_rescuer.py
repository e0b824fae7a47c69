"""The rescuer against a real Redis: what it dispatches again, and what it leaves alone."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from deadlines import until
from stored_runs import Bench, bench, called, failed

from stepfleet.orchestrator.protocol.claim import Refused
from stepfleet.worker.rescuer import Rescuer

GRACE = 60.0


@pytest.fixture
async def desk(redis_url: str) -> AsyncIterator[Bench]:
    async with bench(redis_url, lease=0.5, grace=0.2) as opened:
        yield opened


def rescuer(desk: Bench, long_queue: int = 1000) -> Rescuer:
    """Return one that leaves what it has dispatched alone for a minute."""
    opened = desk.opened
    return Rescuer(
        opened.connection,
        opened.keys,
        opened.dispatch,
        grace=GRACE,
        interval=0.1,
        long_queue=long_queue,
        jitter=lambda: 0.5,
    )


async def empty_the_queue(desk: Bench) -> None:
    await desk.opened.connection.execute("DEL", desk.opened.settings.queue)


async def rescued(desk: Bench, by: Rescuer) -> int:
    async def some() -> int:
        return await by.rescue()

    return await until(some, within=60, what="a rescue")


async def test_a_run_whose_message_was_lost_is_dispatched_again_once(desk: Bench) -> None:
    """DIST-10"""
    run_id = await desk.create()
    await empty_the_queue(desk)
    one = rescuer(desk)
    assert await rescued(desk, one) == 1
    assert await one.rescue() == 0
    assert await desk.queued() == 1
    assert (await desk.claim(run_id)).step == 0


async def test_a_run_whose_worker_vanished_is_dispatched_and_taken_over(desk: Bench) -> None:
    """DIST-08"""
    run_id = await desk.create()
    await desk.claim(run_id)
    await empty_the_queue(desk)
    assert await rescued(desk, rescuer(desk)) == 1
    heir = await desk.claim(run_id)
    assert heir.crashes == 1


async def test_a_retry_comes_when_its_time_has_come_and_not_before(desk: Bench) -> None:
    """ERR-22: `due` is the timer; no ETA, no countdown."""
    soon, late = [await desk.create() for _ in range(2)]
    for run_id, wish in ((late, 600.0), (soon, None)):
        claim = await desk.claim(run_id)
        await desk.commit(claim, replace(failed(claim, transient=True), retry_after=wish))
    await empty_the_queue(desk)
    assert await rescued(desk, rescuer(desk)) == 1
    assert (await desk.claim(soon)).attempts == 1
    assert (await desk.refused(late)).why is Refused.EARLY
    assert await desk.queued() == 1


async def test_ready_runs_are_left_in_a_long_queue(desk: Bench) -> None:
    """Otherwise a queue that is merely long is flooded with duplicates."""
    run_ids = [await desk.create() for _ in range(3)]
    patient, eager = rescuer(desk, long_queue=2), rescuer(desk, long_queue=3)

    async def overdue() -> bool:
        now = (await desk.runs.now()).timestamp() * 1000
        shards = range(desk.opened.keys.shards)
        key = desk.opened.keys.due
        counts = [
            await desk.opened.connection.execute("ZCOUNT", key(shard), "-inf", now)
            for shard in shards
        ]
        return sum(map(int, counts)) == 3

    await until(overdue, within=60)
    assert await patient.rescue() == 0
    assert await desk.queued() == 3
    assert await eager.rescue() == 0
    for run_id in run_ids:  # the time for which they were put off passes
        due = await desk.due(run_id)
        assert due is not None
        key = desk.opened.keys.due(desk.opened.keys.shard_of(run_id))
        await desk.opened.connection.execute("ZADD", key, due - 16 * GRACE * 1000 - 1, run_id)
    assert await eager.rescue() == 3


async def test_runs_left_in_a_queue_that_is_lost_come_back_at_once(desk: Bench) -> None:
    """DIST-10: however long they were put off, an empty queue says that their hints are gone."""
    for _ in range(3):
        await desk.create()
    patient = rescuer(desk, long_queue=2)

    async def all_put_off() -> bool:
        assert await patient.rescue() == 0
        return sum([await put_off(desk, shard) for shard in range(desk.opened.keys.shards)]) == 3

    await until(all_put_off, within=60)
    await empty_the_queue(desk)
    assert await patient.rescue() == 3
    assert await desk.queued() == 3
    assert await patient.rescue() == 0


async def put_off(desk: Bench, shard: int) -> int:
    key, hour = desk.opened.keys.due(shard), 3_600_000
    later = (await desk.runs.now()).timestamp() * 1000 + hour
    return int(await desk.opened.connection.execute("ZCOUNT", key, later, "+inf"))


async def test_the_wait_between_dispatches_of_a_run_doubles(desk: Bench) -> None:
    run_id = await desk.create()
    key = desk.opened.keys.due(desk.opened.keys.shard_of(run_id))
    for doubled in (1, 2, 4):
        await desk.opened.connection.execute("ZADD", key, 1, run_id)
        before = (await desk.runs.now()).timestamp() * 1000
        assert await rescuer(desk).rescue() == 1
        after = (await desk.runs.now()).timestamp() * 1000
        due = await desk.due(run_id)
        assert due is not None
        assert before <= due - GRACE * 1000 * doubled <= after


async def test_ended_and_paused_runs_are_not_dispatched(desk: Bench) -> None:
    """Invariant 7: after an end state nothing new starts."""
    paused = await desk.create()
    await desk.control.pause(paused)
    cancelled = await desk.create()
    await desk.control.cancel(await desk.stored(cancelled), "")
    going = await desk.create()
    claim = await desk.claim(going)
    await desk.commit(claim, called(claim))
    await empty_the_queue(desk)
    assert await rescued(desk, rescuer(desk)) == 1
    assert await desk.due(paused) is None
    assert await desk.due(cancelled) is None
