"""Requests to single runs, in every state that a run can be in, against a real Redis."""

import asyncio
import contextlib
from typing import Any

import pytest
from celery import Celery
from support.deadlines import until
from support.runs.stored_runs import Bench, answered, bench, called, failed, plain_agent

from stepfleet.orchestrator import (
    AsyncFleet,
    ConfigurationError,
    ControlOutcome,
    ControlResult,
    ErrorPolicy,
    Lifecycle,
    StopReason,
)
from stepfleet.orchestrator.protocol.claim import Refused
from stepfleet.orchestrator.settings.settings import load_settings

AGENT = plain_agent(max_steps=2)
UNKNOWN = "00000000-0000-0000-0000-000000000000"


BENCH: dict[str, Any] = {"agent": AGENT}


async def run_in(state: str, fleet: AsyncFleet, desk: Bench) -> str:
    """Return a run in a state: as its status says, or `held` by a worker."""
    run_id = await desk.create()
    if state == "queued":
        return run_id
    if state == "paused":
        await fleet.runs.pause(run_id)
        return run_id
    if state == "cancelled":
        await fleet.runs.cancel(run_id)
        return run_id
    claim = await desk.claim(run_id)
    if state == "completed":
        await desk.commit(claim, answered(claim))
    elif state == "failed":
        await desk.commit(claim, failed(claim))
    elif state in ("in_progress", "stopped"):
        await desk.commit(claim, called(claim))
    if state == "stopped":
        claim = await desk.claim(run_id, 1)
        await desk.commit(claim, called(claim))
    return run_id


ANSWERS = {
    "queued": ("cancelled", "paused", "active", "active"),
    "held": ("requested", "requested", "active", "active"),
    "in_progress": ("cancelled", "paused", "active", "active"),
    "paused": ("cancelled", "paused", "resumed", "active"),
    "completed": ("ended", "ended", "ended", "ConfigurationError"),
    "failed": ("ended", "ended", "ended", "retried"),
    "stopped": ("ended", "ended", "ended", "ConfigurationError"),
    "cancelled": ("ended", "ended", "ended", "retried"),
}
VERBS = ("cancel", "pause", "resume", "retry")


@pytest.mark.parametrize("state", ANSWERS)
@pytest.mark.parametrize("verb", VERBS)
async def test_every_request_has_an_answer_in_every_state(
    fleet: AsyncFleet, desk: Bench, state: str, verb: str
) -> None:
    run_id = await run_in(state, fleet, desk)
    expected = ANSWERS[state][VERBS.index(verb)]
    try:
        answer: ControlResult = await getattr(fleet.runs, verb)(run_id)
    except ConfigurationError:
        assert expected == "ConfigurationError"
    else:
        assert answer.outcome == expected
    await counters_are_exact(desk, [run_id])


async def counters_are_exact(desk: Bench, run_ids: list[str]) -> None:
    """Compare the batch's counters with a recount, and the due index with the states."""
    recount: dict[str, int] = {"total": len(run_ids)}
    for run_id in run_ids:
        header = await desk.header(run_id)
        status = Lifecycle(header["status"])
        name = f"status:{status}"
        recount[name] = recount.get(name, 0) + 1
        if status.is_terminal:
            reason = f"reason:{header['stop_reason']}"
            recount[reason] = recount.get(reason, 0) + 1
        else:
            recount["open"] = recount.get("open", 0) + 1
        active = status in (Lifecycle.QUEUED, Lifecycle.IN_PROGRESS)
        assert (await desk.due(run_id) is not None) is active
    counted = await desk.counters()
    kept = ("total", "open", "status:", "reason:")
    assert {key: value for key, value in counted.items() if key.startswith(kept)} == recount


@pytest.mark.parametrize("verb", VERBS)
async def test_an_unknown_run_is_reported(fleet: AsyncFleet, verb: str) -> None:
    with pytest.raises(ConfigurationError, match=f"no run has the id '{UNKNOWN}'"):
        await getattr(fleet.runs, verb)(UNKNOWN)


async def test_a_cancelled_run_says_why_and_starts_nothing_new(
    fleet: AsyncFleet, desk: Bench
) -> None:
    run_id = await run_in("in_progress", fleet, desk)
    await fleet.runs.cancel(run_id, "not needed any more")
    result = await fleet.runs.result(run_id)
    assert result.stop_reason is StopReason.USER_REQUESTED
    assert result.error is None
    assert result.steps_used == 1
    assert result.outcome is not None
    assert "not needed any more" in result.outcome.reason
    assert (await desk.refused(run_id, 1)).why is Refused.ENDED


async def test_a_cancel_of_a_held_run_is_done_by_its_commit(fleet: AsyncFleet, desk: Bench) -> None:
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    assert await fleet.runs.cancel(run_id) == ControlResult(ControlOutcome.REQUESTED, "test")
    assert (await desk.commit(claim, called(claim))).wanted == "cancel"
    assert (await fleet.runs.result(run_id)).lifecycle is Lifecycle.IN_PROGRESS


async def test_workers_are_notified_at_once_of_the_cancel_of_a_held_run(
    redis_url: str, fleet: AsyncFleet, desk: Bench
) -> None:
    """The control command reaches whoever listens as Celery workers do."""
    heard: list[str] = []
    app = Celery("listener", broker=redis_url, set_as_current=False)
    with app.connection_for_read() as connection:
        node = app.control.mailbox.Node("w1@here", channel=connection.default_channel)

        def stepfleet_interrupt(state: object, run_id: str) -> None:
            heard.append(run_id)

        node.handlers["stepfleet_interrupt"] = stepfleet_interrupt
        with node.listen(callback=node.handle_message):
            await asyncio.to_thread(_drain, connection)  # subscribes
            run_id = await desk.create()
            await desk.claim(run_id)
            await fleet.runs.cancel(run_id)

            async def drained() -> bool:
                await asyncio.to_thread(_drain, connection)
                return heard == [run_id]

            await until(drained, within=60)


async def test_workers_are_told_of_an_end_that_none_of_them_sees_where_a_batch_follows(
    redis_url: str, fleet: AsyncFleet
) -> None:
    heard: list[str] = []
    app = Celery("listener", broker=redis_url, set_as_current=False)
    with app.connection_for_read() as connection:
        node = app.control.mailbox.Node("w1@here", channel=connection.default_channel)

        def stepfleet_interrupt_batch(state: object, batch_id: str) -> None:
            heard.append(batch_id)

        node.handlers["stepfleet_interrupt_batch"] = stepfleet_interrupt_batch
        with node.listen(callback=node.handle_message):
            await asyncio.to_thread(_drain, connection)  # subscribes
            alone = await fleet.submit_batch([{"input": "a"}], AGENT)
            await alone.cancel()  # told before its runs are, which may be in a worker's hands
            followed = await fleet.submit_batch([{"input": "b"}], AGENT)
            await followed.then(AGENT)
            await followed.cancel()  # as before, and when it is over
            await followed.then(AGENT, "Once more: {output}")
            expected = [alone.id, *[followed.id] * 3]

            async def drained() -> bool:
                await asyncio.to_thread(_drain, connection)
                return len(heard) >= len(expected)

            await until(drained, within=60)
            assert heard == expected


def _drain(connection: object) -> None:
    with contextlib.suppress(TimeoutError):
        connection.drain_events(timeout=0.2)  # type: ignore[attr-defined]


async def test_an_unreachable_broker_does_not_fail_a_cancel(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = load_settings(redis_url=redis_url, broker_url="redis://127.0.0.1:1/0")
    async with AsyncFleet(settings=settings) as fleet, bench(redis_url, AGENT) as desk:
        run_id = await desk.create()
        await desk.claim(run_id)
        assert (await fleet.runs.cancel(run_id)).outcome == "requested"
    assert "could not be notified at once" in caplog.text


async def test_a_paused_run_is_not_worked_on_until_it_is_resumed(
    fleet: AsyncFleet, desk: Bench
) -> None:
    run_id = await desk.create()
    await fleet.runs.pause(run_id)
    assert (await desk.refused(run_id)).why is Refused.PAUSED
    waiting = await desk.queued()
    await fleet.runs.resume(run_id)
    assert await desk.queued() == waiting + 1
    await desk.claim(run_id)


async def test_a_pause_that_was_only_asked_for_can_be_taken_back(
    fleet: AsyncFleet, desk: Bench
) -> None:
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    await fleet.runs.pause(run_id)
    assert (await fleet.runs.resume(run_id)).outcome == "active"
    assert (await desk.commit(claim, called(claim))).status == "in_progress"


async def test_a_failed_step_is_taken_back_and_what_came_before_is_kept(
    redis_url: str, fleet: AsyncFleet
) -> None:
    agent = plain_agent(error_policy=ErrorPolicy.stop_on_any_error())
    async with bench(redis_url, agent) as desk:
        run_id = await desk.create(overrides={"time_limit": 50.0}, metadata={"n": 1})
        claim = await desk.claim(run_id)
        await desk.commit(claim, called(claim))
        claim = await desk.claim(run_id, 1)
        await desk.commit(claim, failed(claim))
        before = await fleet.runs.result(run_id)
        assert (before.lifecycle, before.steps_used) == (Lifecycle.FAILED, 2)

        assert await fleet.runs.retry(run_id, max_steps=20) == ControlResult(
            ControlOutcome.RETRIED, "1"
        )
        run = await fleet.runs.show(run_id)
        assert run.overrides == {"time_limit": 50.0, "max_steps": 20}
        assert (run.step, run.state.step_count) == (1, 1)
        result = run.result()
        assert result.lifecycle is Lifecycle.IN_PROGRESS
        assert (result.stop_reason, result.error, result.end_time) == (None, None, None)
        assert result.steps == before.steps[:1]
        assert result.metadata == {"n": 1}
        assert [lost.kind for lost in result.lost_attempts] == ["retried"]
        ttl = await desk.opened.connection.execute("TTL", desk.opened.keys.run(run_id))
        assert ttl == -1
        await counters_are_exact(desk, [run_id])

        claim = await desk.claim(run_id, 1)
        await desk.commit(claim, answered(claim))
        after = await fleet.runs.result(run_id)
        assert (after.lifecycle, after.steps_used, after.max_iterations) == (
            Lifecycle.COMPLETED,
            2,
            20,
        )
        assert after.usage.total_tokens == 30


async def test_of_two_retries_at_once_one_takes_the_run_up(fleet: AsyncFleet, desk: Bench) -> None:
    run_id = await run_in("failed", fleet, desk)
    waiting = await desk.queued()
    answers = await asyncio.gather(*(fleet.runs.retry(run_id) for _ in range(5)))
    assert sorted(answer.outcome for answer in answers) == ["active"] * 4 + ["retried"]
    assert await desk.queued() == waiting + 1
    await counters_are_exact(desk, [run_id])


async def test_a_wrong_override_leaves_the_run_as_it_is(fleet: AsyncFleet, desk: Bench) -> None:
    run_id = await run_in("failed", fleet, desk)
    with pytest.raises(ConfigurationError, match="field 'max_steps'"):
        await fleet.runs.retry(run_id, max_steps=0)
    assert (await fleet.runs.result(run_id)).lifecycle is Lifecycle.FAILED


async def test_counters_stay_exact_under_many_requests_in_any_order(
    fleet: AsyncFleet, desk: Bench
) -> None:
    states = [state for state in ANSWERS for _ in range(2)]
    run_ids = [await run_in(state, fleet, desk) for state in states]

    async def ask(index: int, run_id: str) -> None:
        verbs = [VERBS[(index + turn) % len(VERBS)] for turn in range(4)]
        for verb in verbs:
            try:
                await getattr(fleet.runs, verb)(run_id)
            except ConfigurationError:
                assert verb == "retry"

    await asyncio.gather(*(ask(index, run_id) for index, run_id in enumerate(run_ids)))
    await counters_are_exact(desk, run_ids)
