"""Faults of the protocol's scripts that its model found, each as a plain case."""

from typing import Any

from support.deadlines import until
from support.runs.stored_runs import Bench, answered, bench, called, failed, plain_agent
from support.runs.waits import let_pass

from stepfleet.orchestrator import ControlResult, ErrorPolicy, StoredRun
from stepfleet.orchestrator.protocol.claim import Claim, Refused, Work
from stepfleet.orchestrator.protocol.revision import revise
from stepfleet.worker.runtime.rescuer import Rescuer

GRACE = 60.0


BENCH: dict[str, Any] = {"lease": 30, "grace": GRACE}


async def let_the_lease_run_out(desk: Bench, run_id: str) -> None:
    """Move the lease into the past: what a clock jump amounts to."""
    keys = desk.opened.keys
    await desk.opened.connection.execute("HSET", keys.run(run_id), "lease", 1)
    await desk.opened.connection.execute("ZADD", keys.due(keys.shard_of(run_id)), 1, run_id)


async def retry(desk: Bench, run: StoredRun) -> ControlResult:
    """Take an ended run up again as somebody who read it like that."""
    return await desk.control.retry(run, revise(run.state, run.log, {}, await desk.runs.now()))


def rescuer(desk: Bench, *, long_queue: int = 1000) -> Rescuer:
    opened = desk.opened
    return Rescuer(
        opened.connection,
        opened.keys,
        opened.dispatch,
        grace=GRACE,
        interval=1.0,
        long_queue=long_queue,
        jitter=lambda: 0.5,
    )


async def test_a_commit_repeated_behind_the_next_steps_commit_is_known_as_applied(
    desk: Bench,
) -> None:
    """DIST-04: its reply was lost; it was listed as work that was dropped, with its cost."""
    run_id = await desk.create()
    first = await desk.claim(run_id)
    await desk.commit(first, called(first))
    second = await desk.claim(run_id, step=1)
    await desk.commit(second, called(second))
    assert (await desk.commit(first, called(first))).applied
    assert (await desk.stored(run_id)).lost == ()
    assert "lost" not in await desk.counters()


async def test_a_commit_repeated_behind_a_retry_of_its_run_is_known_as_applied(
    desk: Bench,
) -> None:
    """DIST-04"""
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    await desk.commit(claim, answered(claim))
    assert (await retry(desk, await desk.stored(run_id))).outcome == "retried"
    assert (await desk.commit(claim, answered(claim))).applied
    assert (await desk.stored(run_id)).lost == ()


async def test_a_claim_repeated_behind_its_own_commit_takes_nothing(desk: Bench) -> None:
    """A call out of a dead connection would hold the step for a lease, and count a crash."""
    run_id = await desk.create()
    claim = await desk.claim(run_id, token="same")
    handed_back = failed(claim, transient=True)
    await desk.commit(claim, handed_back)
    await let_pass(desk, run_id)
    late = await desk.steps.claim(Work(run_id, 0), "same")
    assert not isinstance(late, Claim)
    assert late.why is Refused.STALE
    assert (await desk.claim(run_id)).crashes == 0


async def test_an_attempt_that_was_lost_twice_is_one_entry_and_counted_once(desk: Bench) -> None:
    run_id = await desk.create()
    slow = await desk.claim(run_id, token="slow")
    await let_the_lease_run_out(desk, run_id)
    await desk.claim(run_id, token="fast")
    await let_the_lease_run_out(desk, run_id)
    again = await desk.claim(run_id, token="slow")
    assert again.crashes == 2
    await desk.commit(slow, failed(slow, transient=True))
    assert len((await desk.stored(run_id)).lost) == 2
    assert (await desk.counters())["lost"] == 2


async def test_every_retry_of_a_run_has_its_own_entry_among_the_lost_attempts(
    redis_url: str,
) -> None:
    """One replaced the other where no worker had come between them."""
    agent = plain_agent(error_policy=ErrorPolicy.retry_all(3))
    async with bench(redis_url, agent, grace=GRACE) as desk:
        run_id = await desk.create()
        for step in range(3):
            await let_pass(desk, run_id)
            claim = await desk.claim(run_id, step)
            await desk.commit(claim, failed(claim))
        for _ in range(3):
            assert (await retry(desk, await desk.stored(run_id))).outcome == "retried"
            await desk.control.cancel(await desk.stored(run_id), "not now")
        kinds = [lost.kind for lost in (await desk.stored(run_id)).lost]
        assert kinds == ["retried"] * 3
        assert (await desk.counters())["lost"] == 3


async def test_a_retry_asked_for_on_an_older_end_is_refused(desk: Bench) -> None:
    """RUN-12: the run had ended again at the same step; another step's tokens were taken off."""
    run_id = await desk.create()
    first = await desk.claim(run_id)
    await desk.commit(first, called(first, error=True))
    seen = await desk.stored(run_id)
    assert (await retry(desk, seen)).outcome == "retried"
    second = await desk.claim(run_id)
    await desk.commit(second, failed(second))
    assert (await retry(desk, seen)).outcome == "changed"
    counters = await desk.counters()
    assert counters["status:failed"] == counters["steps"] == 1
    assert "tokens" not in counters


async def test_a_wait_is_not_forgotten_because_the_rescuer_came_by_a_slow_worker(
    desk: Bench,
) -> None:
    """ERR-22: with a long queue the retry was not published at all when its time came."""
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    await let_the_lease_run_out(desk, run_id)
    assert await rescuer(desk).rescue() == 1
    await desk.commit(claim, failed(claim, transient=True))

    async def published() -> int:
        return await rescuer(desk, long_queue=-1).rescue()

    assert await until(published, within=60, what="the retry's publication") == 1
