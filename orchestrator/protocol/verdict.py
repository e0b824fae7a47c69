"""What follows from an attempt at a step: the one place where a run's next move is decided.

Pure: clocks, randomness and prices come in as arguments.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from stepfleet.orchestrator.continuation import ContinuationCriteria
from stepfleet.orchestrator.continuation.error_policy import ErrorHandlingDecision
from stepfleet.orchestrator.protocol.attempt import (
    Answered,
    Attempt,
    Failed,
    Interrupted,
    Interruption,
    Parked,
    Prevented,
    Span,
)
from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.protocol.fold import after_step
from stepfleet.orchestrator.protocol.waiting import Waiting, patience
from stepfleet.orchestrator.protocol.waits import backoff
from stepfleet.orchestrator.records.errors import ErrorInfo, ErrorType
from stepfleet.orchestrator.records.memory_window import Remembered, Summary
from stepfleet.orchestrator.records.messages import Message
from stepfleet.orchestrator.records.outcome import ContinuationOutcome, StopReason
from stepfleet.orchestrator.records.run.results import LostAttempt, RunStatus, run_status
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.steps import FinishReason, LoggedStep, StepResult, StepType
from stepfleet.orchestrator.records.tool_text import media_messages
from stepfleet.orchestrator.records.tools import NOT_EXECUTED, ToolCall
from stepfleet.orchestrator.records.usage import UsageStats


class Move(StrEnum):
    """The verbs of the commit."""

    CONTINUE = "continue"
    RETRY = "retry"
    FINISH = "finish"
    RELEASE = "release"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the commit writes.

    `logged` is None when no step came of the attempt. `delay` is in seconds. `lost` is
    work that was paid for and is dropped now; `dropped` is what to note if the commit itself
    comes too late. `attempt` and `limited` say what a retry costs. `waiting` is set when the step
    waits for tool calls; then `lost` is what to note if the wait is ended from outside.
    """

    move: Move
    state: AgentState
    logged: LoggedStep | None = None
    outcome: ContinuationOutcome | None = None
    stop_reason: StopReason | None = None
    error: str | None = None
    delay: float = 0.0
    attempt: bool = False
    limited: bool = False
    lost: LostAttempt | None = None
    dropped: LostAttempt | None = None
    failure: ErrorInfo | None = None
    waiting: Waiting | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What a decision needs beside the claim and the attempt.

    `now` is Redis's time; `jitter` lies between 0 and 1; `worker` names who did the step.
    """

    now: datetime
    jitter: float = 0.5
    worker: str | None = None


def decide(claim: Claim, attempt: Attempt, criteria: ContinuationCriteria, facts: Facts) -> Verdict:
    """Return what follows from `attempt`. Evaluates the criteria with the step's time added."""
    match attempt:
        case Prevented():
            return _finish(claim.state, attempt.outcome)
        case Failed() if attempt.transient and _may_be_deferred(claim, attempt):
            return _deferred(claim, attempt, criteria, facts)
        case Interrupted(by=Interruption.HANDED_BACK) | Interrupted(by=Interruption.LEASE_LOST):
            return Verdict(Move.RELEASE, claim.state, lost=_lost(claim, attempt, "interrupted"))
        case Interrupted(response=None):
            verdict = _finish(claim.state, criteria.evaluate(claim.state))
            return _with_lost(verdict, _lost(claim, attempt, "interrupted"))
        case Parked():
            return _parked(claim, attempt, criteria, facts)
        case _:
            return _committed(claim, attempt, criteria, facts)


def _committed(
    claim: Claim,
    attempt: Answered | Failed | Interrupted,
    criteria: ContinuationCriteria,
    facts: Facts,
) -> Verdict:
    state, logged = _logged(claim, attempt, criteria, facts)
    result, outcome = logged.result, logged.outcome
    assert outcome is not None  # noqa: S101 - each step is logged with one
    ended = None if outcome.should_continue else _finish(state, outcome)
    return Verdict(
        ended.move if ended else Move.CONTINUE,
        state,
        logged,
        outcome,
        stop_reason=ended.stop_reason if ended else None,
        error=ended.error if ended else None,
        delay=0.0 if ended else _policy_delay(claim, attempt, state, facts),
        lost=_in_vain(claim, attempt),
        dropped=_late(claim, attempt, result),
        failure=result.errors[0] if result.errors else None,
    )


def _logged(
    claim: Claim,
    attempt: Answered | Failed | Interrupted,
    criteria: ContinuationCriteria,
    facts: Facts,
) -> tuple[AgentState, LoggedStep]:
    """Return the state behind the step, and the step as it is logged, with its outcome."""
    result = _step_result(claim, attempt, facts)
    remembered = _remembered(attempt)
    if remembered and remembered.summary:
        result = _charged(result, remembered.summary)
    progress = None if isinstance(attempt, Failed) else attempt.progress
    messages = () if isinstance(attempt, Failed) else _messages(attempt)
    if progress:
        messages += progress.messages
        progress = progress.model_copy(update={"messages": ()})
    state = after_step(claim.state, result, messages, facts.now, progress, remembered)
    outcome = criteria.evaluate(state)
    logged = LoggedStep.model_construct(
        result=result,
        messages=messages,
        outcome=outcome,
        execution=state.info.execution,
        committed_at=facts.now,
        progress=progress,
        remembered=remembered,
    )
    return state.with_continuation_outcome(outcome), logged


def _late(
    claim: Claim, attempt: Answered | Failed | Interrupted, result: StepResult
) -> LostAttempt:
    """Return what to note of the step if its commit comes too late."""
    answered = not isinstance(attempt, Failed)
    return LostAttempt.model_construct(
        kind="late",
        step=claim.number,
        seconds=attempt.span.seconds,
        ambiguous=answered and claim.journal.response is None and not result.cached,
        tokens=result.usage.total_tokens if result.usage else 0,
        cost_usd=result.cost_usd,
    )


def _in_vain(claim: Claim, attempt: Answered | Failed | Interrupted) -> LostAttempt | None:
    """Return the ledger entry of a failed step whose call may have been paid for."""
    if not isinstance(attempt, Failed) or claim.journal.response is not None:
        return None
    lost = _lost(claim, attempt, "failed", reason=attempt.error.message)
    return lost if lost.ambiguous else None


def _remembered(attempt: Answered | Failed | Interrupted) -> Remembered | None:
    if isinstance(attempt, Failed):
        return attempt.remembered
    return attempt.response.remembered if attempt.response else None


def _charged(result: StepResult, summary: Summary) -> StepResult:
    """Return the result with what the summary made in that step took."""
    usage = (result.usage or UsageStats()) + summary.usage
    cost = result.cost_usd + summary.cost_usd
    return result.model_copy(update={"usage": usage, "cost_usd": cost})


def _finish(state: AgentState, outcome: ContinuationOutcome) -> Verdict:
    """End the run as `outcome` says; one that does not forbid ends as cancelled work does."""
    reason = outcome.stop_reason
    error = outcome.reason if run_status(reason) is RunStatus.ERROR else None
    return Verdict(
        Move.FINISH,
        state.with_continuation_outcome(outcome),
        outcome=outcome,
        stop_reason=reason,
        error=error,
    )


def _parked(claim: Claim, attempt: Parked, criteria: ContinuationCriteria, facts: Facts) -> Verdict:
    if claim.state.stop_requested is not None:
        return _committed(claim, attempt.otherwise, criteria, facts)
    response = attempt.otherwise.response
    usage = response.usage if response else None
    paid = LostAttempt(
        kind="interrupted",
        step=claim.number,
        seconds=attempt.span.seconds,
        tokens=usage.total_tokens if usage else 0,
        cost_usd=attempt.otherwise.cost_usd,
    )
    seconds = attempt.span.seconds - claim.journal.spent
    late = paid.model_copy(update={"kind": "late", "seconds": seconds})
    waiting = Waiting(
        calls=attempt.waits,
        patience=patience(claim.config, claim.state, facts.now),
        seconds=seconds,
        began=attempt.span.started_at,
    )
    return Verdict(Move.WAIT, claim.state, lost=paid, dropped=late, waiting=waiting)


def _with_lost(verdict: Verdict, lost: LostAttempt) -> Verdict:
    return Verdict(
        verdict.move,
        verdict.state,
        outcome=verdict.outcome,
        stop_reason=verdict.stop_reason,
        error=verdict.error,
        lost=lost,
    )


def _may_be_deferred(claim: Claim, failed: Failed) -> bool:
    stopped = claim.state.stop_requested is not None
    return stopped or failed.limited or claim.attempts + 1 < claim.config.model_attempts


def _deferred(
    claim: Claim, failed: Failed, criteria: ContinuationCriteria, facts: Facts
) -> Verdict:
    if claim.state.stop_requested is None:
        return _try_again(claim, failed, facts)
    verdict = _finish(claim.state, criteria.evaluate(claim.state))
    return _with_lost(verdict, _lost(claim, failed, "deferred"))


def _try_again(claim: Claim, failed: Failed, facts: Facts) -> Verdict:
    failures = claim.attempts + claim.limited + 1
    return Verdict(
        Move.RETRY,
        claim.state,
        delay=backoff(failures, retry_after=failed.retry_after, jitter=facts.jitter),
        attempt=not failed.limited,
        limited=failed.limited,
        lost=_lost(claim, failed, "deferred", reason=failed.error.message),
        failure=failed.error,
    )


def _policy_delay(claim: Claim, attempt: Attempt, state: AgentState, facts: Facts) -> float:
    """Seconds before the step that a policy's retry asks for; none when tools answered."""
    if not isinstance(attempt, Failed):
        return 0.0
    if claim.config.error_policy.decide(state.failures) is not ErrorHandlingDecision.RETRY:
        return 0.0
    failures = state.failures.consecutive_failures
    return backoff(failures, retry_after=attempt.retry_after, jitter=facts.jitter)


def _lost(
    claim: Claim, attempt: Failed | Interrupted, kind: str, reason: str | None = None
) -> LostAttempt:
    """Describe an attempt that is not committed. A refusal or an error answer costs nothing."""
    unanswered = isinstance(attempt, Interrupted) and attempt.response is None
    timed_out = isinstance(attempt, Failed) and attempt.error.type is ErrorType.TIMEOUT
    spent = attempt.spent if isinstance(attempt, Failed) else None
    return LostAttempt(
        kind=kind,
        step=claim.number,
        # What was spent before a wait stays in the journal, and counts with the step.
        seconds=attempt.span.seconds - claim.journal.spent,
        ambiguous=unanswered or timed_out or spent is not None,
        tokens=spent.tokens if spent else 0,
        cost_usd=spent.cost_usd if spent else None,
        estimated=spent is not None and spent.estimated,
        reason=reason,
    )


def _step_result(
    claim: Claim, attempt: Answered | Failed | Interrupted, facts: Facts
) -> StepResult:
    span: Span = attempt.span
    if isinstance(attempt, Failed):
        return StepResult(
            step=claim.number,
            finish_reason=FinishReason.ERROR,
            type=StepType.ERROR,
            errors=(attempt.error,),
            usage_reported=False,
            started_at=span.started_at,
            duration_ms=span.seconds * 1000,
            worker=facts.worker,
        )
    response = attempt.response
    assert response is not None  # noqa: S101 - decide() has matched the other case
    errors = tuple(
        record.error
        for index, record in enumerate(attempt.records)
        if record.error and record.error.code != NOT_EXECUTED and index not in attempt.handled
    )
    progress = attempt.progress
    if progress and progress.error:
        errors += (progress.error,)
    step_type = _step_type(has_errors=bool(errors), has_tools=bool(attempt.records))
    if progress and progress.step_type and not errors:
        step_type = progress.step_type
    usage = response.usage or UsageStats()
    if response.cache is None or not response.cache.hit:
        usage = usage.model_copy(update={"llm_calls": 1})
    return StepResult.model_construct(
        step=claim.number,
        thought=response.content or None,
        tool_calls=attempt.records,
        usage=usage,
        usage_reported=response.usage is not None and not response.usage_estimated,
        cost_usd=attempt.cost_usd,
        finish_reason=response.finish_reason,
        type=step_type,
        errors=errors,
        started_at=span.started_at,
        duration_ms=span.seconds * 1000,
        model=response.model or claim.config.model,
        worker=facts.worker,
        cache=response.cache,
    )


def _step_type(*, has_errors: bool, has_tools: bool) -> StepType:
    if has_errors:
        return StepType.ERROR
    return StepType.TOOL_EXECUTION if has_tools else StepType.FINAL_RESPONSE


def _messages(attempt: Answered | Interrupted) -> tuple[Message, ...]:
    """Return the assistant's message and, behind it, one tool message per call in call order.

    Images that tools returned stand in one message more.
    """
    response = attempt.response
    assert response is not None  # noqa: S101 - decide() has matched the other case
    calls: tuple[ToolCall, ...] = response.tool_calls or ()
    answers = (Message.tool(call, text) for call, text in zip(calls, attempt.texts, strict=True))
    shown = media_messages(attempt.records)
    return (Message.assistant(response.content, calls), *answers, *shown)
