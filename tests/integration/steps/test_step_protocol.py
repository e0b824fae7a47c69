"""Claim, journal and commit against a real Redis: fencing, duplicates, lost replies, counters."""

import json
from dataclasses import replace
from typing import Any

from support.deadlines import until
from support.runs.stored_runs import Bench, answered, bench, called, failed, plain_agent
from support.runs.waits import wait_of

from stepfleet.orchestrator import ErrorPolicy, Lifecycle, StopReason
from stepfleet.orchestrator.protocol.claim import Claim, Refusal, Refused, Work
from stepfleet.orchestrator.protocol.revision import revise
from stepfleet.orchestrator.records.steps import StepType
from stepfleet.orchestrator.store.runs.submission import NewRun

LEASE = 600.0


BENCH: dict[str, Any] = {"lease": LEASE, "grace": 60}


async def lease_runs_out(desk: Bench, run_id: str) -> None:
    """Move the lease into the past; whether leases end by themselves is tested once."""
    await desk.opened.connection.execute("HSET", desk.opened.keys.run(run_id), "lease", 1)


async def test_a_new_run_is_queued_due_and_has_one_message(desk: Bench) -> None:
    """STATE-08, DIST-02: the message carries ids and numbers only."""
    run_id = await desk.create()
    stored = await desk.stored(run_id)
    assert stored.state.status is Lifecycle.QUEUED
    told = [(message.role, message.text) for message in stored.state.messages]
    assert told == [("system", "Be brief."), ("user", "hello")]
    assert await desk.due(run_id) is not None
    assert await desk.queued() == 1
    message = await desk.opened.connection.execute("LINDEX", desk.opened.settings.queue, 0)
    assert len(message) < 1200
    assert "hello" not in message


async def test_creating_a_run_twice_changes_nothing(desk: Bench) -> None:
    run_id = await desk.create()
    before = await desk.header(run_id)
    config = before["config"]
    again = NewRun(run_id, "plain", config, (), 10, batch_id="b1")
    assert not await desk.submission.create(again)
    assert await desk.header(run_id) == before
    assert (await desk.counters())["total"] == 1
    assert await desk.queued() == 1


async def test_a_commit_writes_log_counters_and_the_next_message_at_once(desk: Bench) -> None:
    """DIST-01, DIST-06, CONT-25, RUN-06."""
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    committed = await desk.commit(claim, called(claim))
    assert committed.applied
    header = await desk.header(run_id)
    assert header["step"] == "1"
    assert header["token"] == ""
    assert await desk.queued() == 2
    last = json.loads(await desk.opened.connection.execute("LINDEX", "stepfleet", -1))
    assert last["headers"]["shadow"] == "plain: step 2"
    stored = await desk.stored(run_id)
    assert [step.result.step for step in stored.log] == [1]
    assert stored.log[0].outcome is not None
    assert stored.log[0].outcome.should_continue
    assert await desk.counters() == {
        "total": 1,
        "open": 1,
        "status:in_progress": 1,
        "steps": 1,
        "tokens": 15,
        "calls": 1,
        "cost": 250_000_000,
    }


async def test_a_run_that_stopped_has_no_further_message_and_leaves_the_index(
    desk: Bench,
) -> None:
    """CONT-25, DIST-13, STATE-10: ended runs expire, and stand in no index of active ones."""
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    await desk.commit(claim, answered(claim))
    assert await desk.queued() == 1
    assert await desk.due(run_id) is None
    stored = (await desk.stored(run_id)).result()
    assert stored.stop_reason is StopReason.COMPLETED
    assert stored.lifecycle is Lifecycle.COMPLETED
    assert stored.output == "fine"
    await desk.keep_up()
    ttl = await desk.opened.connection.execute("TTL", desk.opened.keys.run(run_id))
    assert 0 < ttl <= desk.opened.settings.retention
    counters = await desk.counters()
    assert counters["status:completed"] == counters["reason:completed"] == 1
    assert "open" not in counters


async def test_a_worker_keeps_what_it_read_of_a_run_until_the_run_ends(desk: Bench) -> None:
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    await desk.commit(claim, called(claim))
    kept = desk.steps.reader.kept
    claim = await desk.claim(run_id, 1)
    assert run_id in kept
    await desk.commit(claim, answered(claim))
    assert run_id not in kept


async def test_an_active_run_never_expires(desk: Bench) -> None:
    """DIST-13"""
    run_id = await desk.create()
    await desk.claim(run_id)
    assert await desk.opened.connection.execute("TTL", desk.opened.keys.run(run_id)) == -1


async def test_of_two_workers_on_one_step_one_is_refused(desk: Bench) -> None:
    """DIST-03, DIST-04"""
    run_id = await desk.create()
    await desk.claim(run_id)
    refusal = await desk.refused(run_id)
    assert refusal.why is Refused.LEASED
    assert 0 < int(refusal.detail) <= LEASE * 1000


async def test_a_claim_whose_reply_was_lost_is_answered_again(desk: Bench) -> None:
    run_id = await desk.create()
    first = await desk.claim(run_id, token="same")
    second = await desk.claim(run_id, token="same")
    assert (first.step, first.attempts, first.crashes) == (second.step, 0, 0)


async def test_a_commit_whose_reply_was_lost_is_not_applied_twice(desk: Bench) -> None:
    """DIST-04"""
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    assert (await desk.commit(claim, called(claim))).applied
    assert (await desk.commit(claim, called(claim))).applied
    assert (await desk.header(run_id))["step"] == "1"
    assert (await desk.counters())["steps"] == 1
    assert await desk.queued() == 2


async def test_messages_for_other_steps_are_refused(desk: Bench) -> None:
    """A stale duplicate, and a hint that runs ahead of a store that was rolled back."""
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    await desk.commit(claim, called(claim))
    assert (await desk.refused(run_id, step=0)).why is Refused.STALE
    assert (await desk.refused(run_id, step=2)).why is Refused.AHEAD
    assert (await desk.refused("nobody")).why is Refused.UNKNOWN


async def test_an_ended_run_refuses_every_claim(desk: Bench) -> None:
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    await desk.commit(claim, answered(claim))
    assert (await desk.refused(run_id, step=1)).why is Refused.ENDED


async def test_a_worker_that_lost_its_lease_cannot_commit(desk: Bench) -> None:
    """DIST-03, DIST-05, ERR-29, TIME-17: one commit, one clean refusal that lists its cost."""
    run_id = await desk.create()
    desk.steps.lease = 0.5
    slow = await desk.claim(run_id)

    async def taken_over() -> Claim | None:
        found = await desk.steps.claim(Work(run_id, 0), desk.token())
        return found if isinstance(found, Claim) else None

    fast = await until(taken_over, within=60)
    assert fast is not None
    assert (fast.now - slow.now).total_seconds() >= 0.5
    assert fast.crashes == 1
    assert fast.state.failures.consecutive_failures == 0
    assert (await desk.commit(fast, called(fast))).applied
    late = await desk.commit(slow, called(slow))
    assert not late.applied
    result = (await desk.stored(run_id)).result()
    assert len(result.steps) == 1
    (lost,) = result.lost_attempts
    assert (lost.kind, lost.ambiguous, lost.cost_usd) == ("late", True, 0.25)
    assert result.cost_usd == 0.25
    assert result.cumulative_execution_seconds == 0.5


async def test_a_lease_that_was_renewed_is_not_taken_over(desk: Bench) -> None:
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    first = int((await desk.header(run_id))["lease"])
    await lease_runs_out(desk, run_id)
    assert (await desk.steps.journal(claim, 0.1)).ours
    assert int((await desk.header(run_id))["lease"]) >= first
    assert (await desk.refused(run_id)).why is Refused.LEASED


async def test_the_journal_is_handed_to_the_next_owner_and_gone_after_the_commit(
    desk: Bench,
) -> None:
    """TOOL-26: what was paid for and what was done is not done again."""
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    attempt = called(claim)
    await desk.steps.journal(claim, 0.1, response=attempt.response, started=(0,))
    await desk.steps.journal(claim, 0.2, results={0: attempt.records[0]})
    await lease_runs_out(desk, run_id)
    heir = await desk.claim(run_id)
    assert heir.journal.response == attempt.response
    assert heir.journal.started == {0}
    assert heir.journal.results == {0: attempt.records[0]}
    await desk.commit(heir, attempt)
    following = await desk.claim(run_id, step=1)
    assert following.journal.response is None


async def test_a_transient_failure_waits_outside_the_queue(desk: Bench) -> None:
    """ERR-22, DIS-11: no slot is held, no step counted; the attempt is listed apart."""
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    await desk.commit(claim, replace(failed(claim, transient=True), retry_after=600.0))
    assert (await desk.refused(run_id)).why is Refused.EARLY
    assert await desk.queued() == 1
    header = await desk.header(run_id)
    assert (header["attempt"], header["limited"], header["step"]) == ("1", "0", "0")
    result = (await desk.stored(run_id)).result()
    assert result.steps == ()
    assert [lost.kind for lost in result.lost_attempts] == ["deferred"]
    due = await desk.due(run_id)
    assert due is not None
    assert due == (await wait_of(desk, run_id))["deadline"]


async def test_a_refusal_for_now_costs_time_but_no_attempt(desk: Bench) -> None:
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    await desk.commit(claim, failed(claim, transient=True, limited=True))
    header = await desk.header(run_id)
    assert (header["attempt"], header["limited"]) == ("0", "1")


async def test_used_up_attempts_become_the_steps_error(redis_url: str) -> None:
    """ERR-19, ERR-31: then the error policy decides."""
    async with bench(redis_url, plain_agent(model_attempts=1)) as desk:
        run_id = await desk.create()
        claim = await desk.claim(run_id)
        await desk.commit(claim, failed(claim, transient=True))
        result = (await desk.stored(run_id)).result()
    assert result.stop_reason is StopReason.ERROR
    assert result.error is not None
    assert "no answer" in result.error
    assert result.steps[0].type is StepType.ERROR


async def test_a_policys_retry_is_a_new_step_after_a_wait(redis_url: str) -> None:
    """ERR-22, ERR-29, CONT-29: trap F1, a failed model call is retried and not `completed`."""
    agent = plain_agent(error_policy=ErrorPolicy.retry_all(3), model_attempts=1)
    async with bench(redis_url, agent) as desk:
        run_id = await desk.create()
        claim = await desk.claim(run_id)
        await desk.commit(claim, replace(failed(claim), retry_after=600.0))
        assert (await desk.refused(run_id, step=1)).why is Refused.EARLY
        header = await desk.header(run_id)
        assert header["step"] == "1"
        assert header["status"] == "in_progress"


async def test_a_cancel_during_a_step_ends_the_run_at_its_commit(desk: Bench) -> None:
    """CONT-22, RUN-17, DIST-09: the outcome is resolved by the request."""
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    answer = await desk.control.cancel(await desk.stored(run_id), "enough")
    assert answer.outcome == "requested"
    assert (await desk.steps.journal(claim, 0.1)).want == "cancel"
    refused = await desk.commit(claim, called(claim))
    assert (refused.applied, refused.wanted) == (False, "cancel")
    state = claim.state.model_copy(update={"stop_requested": "enough"})
    committed = await desk.commit(replace(claim, state=state), called(claim))
    assert (committed.applied, committed.status) == (True, "cancelled")
    result = (await desk.stored(run_id)).result()
    assert result.stop_reason is StopReason.USER_REQUESTED
    assert result.outcome is not None
    assert result.outcome.resolved_by == "StopRequested"
    assert len(result.steps) == 1


async def test_a_cancel_of_a_waiting_run_ends_it_without_a_worker(desk: Bench) -> None:
    """CONT-22, CONT-28"""
    run_id = await desk.create()
    answer = await desk.control.cancel(await desk.stored(run_id), "not needed")
    assert answer.outcome == "cancelled"
    result = (await desk.stored(run_id)).result()
    assert result.lifecycle is Lifecycle.CANCELLED
    assert result.outcome is not None
    assert "not needed" in result.outcome.reason
    assert (await desk.refused(run_id)).why is Refused.ENDED


async def test_a_pause_during_a_step_takes_effect_at_its_commit(desk: Bench) -> None:
    """DIST-09, TIME-13: and resuming goes on at the next step with the same cumulative time."""
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    assert (await desk.control.pause(run_id)).outcome == "requested"
    committed = await desk.commit(claim, called(claim, seconds=2.0))
    assert committed.status == "paused"
    assert await desk.due(run_id) is None
    assert (await desk.refused(run_id, step=1)).why is Refused.PAUSED
    answer = await desk.control.resume(await desk.stored(run_id))
    assert (answer.outcome, answer.detail) == ("resumed", "1")
    following = await desk.claim(run_id, step=1)
    assert following.state.info.cumulative_execution_seconds == 2.0


async def test_a_run_written_by_a_newer_version_is_left_to_newer_workers(desk: Bench) -> None:
    """SER-24, DIST-14: refused clearly, not lost, and not claimed."""
    run_id = await desk.create()
    await desk.opened.connection.execute("HSET", desk.opened.keys.run(run_id), "v", 99)
    refusal = await desk.steps.claim(Work(run_id, 0), desk.token())
    assert isinstance(refusal, Refusal)
    assert refusal.why is Refused.UNREADABLE
    assert "upgrade" in refusal.detail
    assert (await desk.header(run_id))["token"] == ""
    assert await desk.due(run_id) is not None


async def test_a_failed_step_is_retried_and_everything_before_it_kept(desk: Bench) -> None:
    """RUN-12: counters move back exactly; the model's answer and finished tools are kept."""
    run_id = await desk.create()
    first = await desk.claim(run_id)
    await desk.commit(first, called(first))
    second = await desk.claim(run_id, step=1)
    await desk.commit(second, called(second, error=True))
    before = await desk.stored(run_id)
    assert before.state.status is Lifecycle.FAILED
    revision = revise(before.state, before.log, {"max_steps": 20}, await desk.runs.now())
    answer = await desk.control.retry(before, revision)
    assert (answer.outcome, answer.detail) == ("retried", "1")
    counters = await desk.counters()
    assert counters["steps"] == 1
    assert counters["tokens"] == 15
    assert counters["status:in_progress"] == counters["open"] == 1
    assert "reason:error" not in counters
    again = await desk.claim(run_id, step=1)
    assert again.config.max_steps == 20
    assert again.journal.response is not None
    assert again.journal.results == {}
    assert again.state.failures.consecutive_failures == 0
    assert await desk.opened.connection.execute("TTL", desk.opened.keys.run(run_id)) == -1
    await desk.commit(again, answered(again))
    assert (await desk.stored(run_id)).result().success


async def test_events_are_numbered_without_gaps_and_follow_the_commits(desk: Bench) -> None:
    """EVT-19"""
    run_id = await desk.create()
    first = await desk.claim(run_id)
    await desk.commit(first, called(first))
    second = await desk.claim(run_id, step=1)
    await desk.commit(second, answered(second))
    events, _ = await desk.runs.events(run_id)
    assert [event["sequence"] for event in events] == list(range(1, len(events) + 1))
    assert [e["payload"]["status"] for e in events if e["type"] == "agent.status"] == [
        "queued",
        "in_progress",
        "completed",
    ]
