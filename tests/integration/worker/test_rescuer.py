"""The rescuer against a real Redis: what it dispatches again, and what it leaves alone."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from support.deadlines import until
from support.runs.stored_runs import Bench, called, failed

from stepfleet.orchestrator.errors import StoreError
from stepfleet.orchestrator.events.envelope import Events
from stepfleet.orchestrator.protocol.claim import Refused
from stepfleet.orchestrator.protocol.verdict import Move, Verdict
from stepfleet.orchestrator.store.keys import RESCUER
from stepfleet.worker.runtime.rescuer import AGAIN_SECONDS, MOST_AGAIN, Rescuer, StoreClock

GRACE = 60.0


BENCH: dict[str, Any] = {"lease": 0.5, "grace": 0.2}


def rescuer(desk: Bench, long_queue: int = 1000, interval: float = 0.1) -> Rescuer:
    """Return one that leaves what it has dispatched alone for a minute."""
    opened = desk.opened
    return Rescuer(
        opened.connection,
        opened.keys,
        opened.dispatch,
        grace=GRACE,
        interval=interval,
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


@dataclass
class Lines:
    """Lines of limits in which nobody is: the limits' keys were lost, or cannot be read."""

    error: StoreError | None = None
    look_seconds: float = 30.0

    async def lost_among(self, run_ids: Sequence[str]) -> Sequence[str]:
        if self.error:
            raise self.error
        return run_ids


async def waits_for_a_limit(desk: Bench) -> str:
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    released = Verdict(Move.RELEASE, claim.state)
    await desk.steps.commit(claim, released, Events([]), publish=False)
    await desk.steps.shelve(claim.hint, "openai:m", 0.0)
    await empty_the_queue(desk)
    return run_id


async def test_a_run_that_is_in_no_line_any_more_is_dispatched(desk: Bench) -> None:
    """The limits' keys were lost."""
    run_id = await waits_for_a_limit(desk)
    one = rescuer(desk)
    one.lines = Lines()
    assert await rescued(desk, one) == 1
    assert await desk.queued() == 1
    due = await desk.due(run_id)
    assert due is not None
    assert 0 < due - (await desk.runs.now()).timestamp() * 1000 <= 30_000, "the next look"
    assert (await desk.claim(run_id)).step == 0


async def test_others_are_dispatched_where_the_lines_cannot_be_read(desk: Bench) -> None:
    """By the same scan, which leaves both alone for long."""
    limited, lost = await waits_for_a_limit(desk), await desk.create()
    await empty_the_queue(desk)
    keys = desk.opened.keys
    for run_id in (limited, lost):
        await desk.opened.connection.execute("ZADD", keys.due(keys.shard_of(run_id)), 1, run_id)
    one = rescuer(desk)
    one.lines = Lines(StoreError("the limits are away"))
    with pytest.raises(StoreError, match="the limits are away"):
        await one.rescue()
    assert await desk.queued() == 1
    assert (await desk.claim(lost)).step == 0


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


async def waited_long(desk: Bench) -> None:
    """Let all runs that were put off have waited in the queue for as long as it takes."""
    connection, keys = desk.opened.connection, desk.opened.keys
    for shard in range(keys.shards):
        for run_id in await connection.execute("ZRANGE", keys.due(shard), 0, -1):
            back = (16 * GRACE + AGAIN_SECONDS + 1) * 1000
            await connection.execute("ZINCRBY", keys.due(shard), -back, run_id)


async def leave_in_the_queue(desk: Bench, by: Rescuer, runs: int) -> list[str]:
    """Create runs, and let the rescuer put all of them off."""
    run_ids = [await desk.create() for _ in range(runs)]

    async def all_put_off() -> bool:
        assert await by.rescue() == 0
        return sum([await put_off(desk, shard) for shard in range(desk.opened.keys.shards)]) == runs

    await until(all_put_off, within=60)
    return run_ids


async def test_a_hint_that_a_long_queue_lost_comes_back_though_it_stays_long(desk: Bench) -> None:
    """DIST-10: it comes to the queue's end, once, and then after a longer while."""
    patient = rescuer(desk, long_queue=0)
    # No more than two: a shard that had all three would publish two of them.
    run_ids = await leave_in_the_queue(desk, patient, 2)
    queue = desk.opened.settings.queue
    connection = desk.opened.connection
    assert run_ids[0] in str(await connection.execute("RPOP", queue))
    assert await patient.rescue() == 0
    await waited_long(desk)
    assert await patient.rescue_all() == 2
    assert await patient.rescue_all() == 0
    messages = [str(one) for one in await connection.execute("LRANGE", queue, 0, -1)]
    assert [sum(run_id in one for one in messages) for run_id in run_ids] == [1, 2]
    assert any(run_ids[0] in one for one in messages[:2]), "not at the queue's end"
    await waited_long(desk)
    assert await patient.rescue_all() == 0, "it waits for longer now"


async def test_few_of_those_that_wait_in_a_long_queue_are_published_again(desk: Bench) -> None:
    """However many there are, and however long they have waited."""
    patient = rescuer(desk, long_queue=0)
    await leave_in_the_queue(desk, patient, 120)
    await waited_long(desk)
    shards = desk.opened.keys.shards
    assert 0 < await patient.rescue_all() <= max(MOST_AGAIN, shards)
    assert 0 < await patient.rescue_all() <= max(MOST_AGAIN, shards)


async def test_rescuers_take_turns(desk: Bench) -> None:
    """One of many looks at each shard; whoever is gone keeps the others for part of an interval."""
    many = [rescuer(desk, interval=3600.0) for _ in range(20)]
    turns = await asyncio.gather(*(one.take_turn() for one in many))
    looked = sorted(shard for turn in turns for shard in turn)
    assert looked == list(range(desk.opened.keys.shards))
    quick = rescuer(desk, interval=0.1)

    async def is_over() -> bool:
        return len(await quick.take_turn()) == desk.opened.keys.shards

    await until(is_over, within=30, what="a turn of one whose interval is shorter")


async def test_a_turn_of_a_time_to_come_keeps_nobody(desk: Bench) -> None:
    """The store's clock was set back since."""
    one = rescuer(desk, interval=3600.0)
    await one.take_turn()
    connection, keys = desk.opened.connection, desk.opened.keys
    for place in [RESCUER, *(f"{keys.tag(shard)}rescuer" for shard in range(keys.shards))]:
        if await connection.execute("EXISTS", place):
            await connection.execute("SET", place, 10**14)
    assert len(await one.take_turn()) == keys.shards


async def overdue(desk: Bench) -> None:
    """Have one run whose lease is over, as all are when the store's clock is set forward."""
    run_id = await desk.create()
    await empty_the_queue(desk)
    keys = desk.opened.keys
    await desk.opened.connection.execute("ZADD", keys.due(keys.shard_of(run_id)), 1, run_id)


async def test_nothing_is_rescued_where_the_stores_clock_was_set_forward(desk: Bench) -> None:
    """Neither by who has the turn already, nor until those who live have renewed."""
    await overdue(desk)
    behind = 0.0
    one = rescuer(desk, interval=0.001)
    one.calm, one.clock = 600.0, StoreClock(20.0, lambda: time.monotonic() - behind)
    await one.take_turn()
    behind = 3600.0  # seen from here, the store's clock is an hour ahead now
    assert await one.rescue_all() == 0
    turn = await until(one.take_turn, within=30, what="a turn")
    assert await one.rescue_all(shards=turn) == 0
    assert await one.rescue_all() == 0
    assert await desk.queued() == 0
    assert await rescuer(desk).rescue_all() == 1


async def test_rescue_goes_on_behind_a_step_of_the_stores_clock(
    desk: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    await overdue(desk)
    behind = 0.0
    one = rescuer(desk, interval=0.001)
    one.clock = StoreClock(20.0, lambda: time.monotonic() - behind)
    assert await one.take_turn()
    behind = 3600.0
    assert await until(one.take_turn, within=30, what="a turn")
    assert "Redis's clock was set forward by 36" in caplog.text
    assert await one.rescue_all() == 1


async def test_a_rescuer_does_nothing_while_it_is_not_its_turn(desk: Bench) -> None:
    run_id = await desk.create()
    await empty_the_queue(desk)
    connection, keys = desk.opened.connection, desk.opened.keys
    await connection.execute("ZADD", keys.due(keys.shard_of(run_id)), 1, run_id)
    one = rescuer(desk, interval=3600.0)
    assert await one.rescue_all(shards=()) == 0
    await one.take_turn()
    assert await one.rescue_all(shards=await one.take_turn()) == 0
    assert await desk.queued() == 0
    assert await one.rescue_all() == 1


async def test_who_watches_looks_in_its_turn_only(desk: Bench) -> None:
    """It asks for its turn again and again; while somebody else has it, nothing is looked at."""
    run_id = await desk.create()
    await empty_the_queue(desk)
    opened = desk.opened
    await opened.connection.execute(
        "ZADD", opened.keys.due(opened.keys.shard_of(run_id)), 1, run_id
    )
    await rescuer(desk, interval=3600.0).take_turn()
    eager = Rescuer(
        *(opened.connection, opened.keys, opened.dispatch),
        grace=GRACE,
        interval=3600.0,
        long_queue=1000,
        jitter=lambda: -1.99995,  # a turn lasts for most of an hour, and it asks all the time
    )

    async def scripts() -> int:
        found = await opened.connection.execute("INFO", "commandstats")
        stats = found["cmdstat_evalsha"] if isinstance(found, dict) else found
        return int(stats["calls"])

    before = await scripts()

    async def has_asked() -> bool:
        return await scripts() > before + 3

    watch = asyncio.create_task(eager.watch())
    try:
        await until(has_asked, within=60, what="some rounds")
        assert await desk.queued() == 0
        await opened.connection.execute("DEL", RESCUER)
        await until(desk.queued, within=60, what="a rescue")
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


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
