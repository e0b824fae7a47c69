"""A run that ends in the midst of a step: what the step has done is not done again by a retry."""

from typing import Any

from support.runs.stored_runs import Bench, called

from stepfleet.orchestrator import Message, StoredRun
from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.protocol.revision import further_turn, revise

BENCH: dict[str, Any] = {"lease": 30, "grace": 60}


async def cancelled_with_an_open_step(desk: Bench, batch: str = "b1") -> tuple[StoredRun, Claim]:
    """A worker has journaled its answer and started a tool, and hands the run back."""
    run_id = await desk.create(batch=batch)
    claim = await desk.claim(run_id)
    attempt = called(claim)
    await desk.steps.journal(
        claim, 0.5, response=attempt.response, started=(0, 1), results={0: attempt.records[0]}
    )
    keys = desk.opened.keys
    await desk.opened.connection.execute("HSET", keys.run(run_id), "token", "")
    answer = await desk.control.cancel(await desk.stored(run_id), "not now")
    assert answer.outcome == "cancelled"
    return await desk.stored(run_id), claim


async def test_a_retry_keeps_the_answer_and_the_tools_of_the_step_that_a_cancel_broke_off(
    desk: Bench,
) -> None:
    """TOOL-26: the call was made again, unlisted, and the tools ran twice."""
    run, before = await cancelled_with_an_open_step(desk, batch="")  # else the batch's end counts
    journal = f"{desk.opened.keys.run(run.run_id)}:journal"
    assert await desk.opened.connection.execute("TTL", journal) > 0
    revision = revise(run.state, run.log, {}, await desk.runs.now())
    assert (await desk.control.retry(run, revision)).outcome == "retried"
    claim = await desk.claim(run.run_id)
    assert claim.journal.response == called(before).response
    assert claim.journal.started == {0, 1}
    assert set(claim.journal.results) == {0}
    assert await desk.opened.connection.execute("TTL", journal) == -1
    assert (await desk.stored(run.run_id)).lost == ()


async def test_a_further_message_drops_an_open_answer_and_lists_it(desk: Bench) -> None:
    """The answer was to another conversation; it was paid for."""
    run, _ = await cancelled_with_an_open_step(desk)
    turn = further_turn(run.state, run.log, {}, await desk.runs.now())
    given = (Message.user("something else"),)
    assert (await desk.control.retry(run, turn, given)).outcome == "retried"
    claim = await desk.claim(run.run_id)
    assert claim.journal.response is None
    assert not claim.journal.started
    (lost,) = (await desk.stored(run.run_id)).lost
    assert (lost.kind, lost.step, lost.ambiguous) == ("retried", 1, True)
    assert (await desk.counters())["lost"] == 1
