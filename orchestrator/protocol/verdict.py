"""What follows from an attempt at a step: the one place where a run's next move is decided.

Pure: clocks, randomness and prices come in as arguments.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from stepfleet.orchestrator.continuation import ContinuationCriteria
from stepfleet.orchestrator.error_policy import ErrorHandlingDecision
from stepfleet.orchestrator.protocol.attempt import (
    Answered,
    Attempt,
    Failed,
    Interrupted,
    Interruption,
    Prevented,
    Span,
)
from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.protocol.fold import after_step
from stepfleet.orchestrator.protocol.refusals import NOT_EXECUTED
from stepfleet.orchestrator.protocol.waits import backoff
from stepfleet.orchestrator.records.errors import ErrorInfo, ErrorType
from stepfleet.orchestrator.records.messages import Message
from stepfleet.orchestrator.records.outcome import ContinuationOutcome, StopReason
from stepfleet.orchestrator.records.results import LostAttempt, RunStatus, run_status
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.steps import FinishReason, LoggedStep, StepResult, StepType
from stepfleet.orchestrator.records.tools import ToolCall
from stepfleet.orchestrator.records.usage import UsageStats


class Move(StrEnum):
    """The verbs of the commit."""

    CONTINUE = "continue"
    RETRY = "retry"
    FINISH = "finish"
    RELEASE = "release"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the commit writes.

    `logged` is None when no step came of the attempt. `delay` is in seconds. `lost` is
    work that was paid for and is dropped now; `dropped` is what to note if the commit itself
    comes too late. `attempt` and `limited` say what a retry costs.
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
        case Failed() if attempt.transient and claim.state.stop_requested is not None:
            verdict = _finish(claim.state, criteria.evaluate(claim.state))
            return _with_lost(verdict, _lost(claim, attempt, "deferred"))
        case Failed() if attempt.transient and _may_try_again(claim, attempt):
            return _try_again(claim, attempt, facts)
        case Interrupted(by=Interruption.HANDED_BACK) | Interrupted(by=Interruption.LEASE_LOST):
            return Verdict(Move.RELEASE, claim.state, lost=_lost(claim, attempt, "interrupted"))
        case Interrupted(response=None):
            verdict = _finish(claim.state, criteria.evaluate(claim.state))
            return _with_lost(verdict, _lost(claim, attempt, "interrupted"))
        case _:
            return _committed(claim, attempt, criteria, facts)


def _committed(
    claim: Claim,
    attempt: Answered | Failed | Interrupted,
    criteria: ContinuationCriteria,
    facts: Facts,
) -> Verdict:
    result = _step_result(claim, attempt, facts)
    messages = () if isinstance(attempt, Failed) else _messages(attempt)
    state = after_step(claim.state, result, messages, facts.now)
    outcome = criteria.evaluate(state)
    logged = LoggedStep(
        result=result,
        messages=messages,
        outcome=outcome,
        execution=state.info.execution,
        committed_at=facts.now,
    )
    dropped = LostAttempt(
        kind="late",
        step=claim.number,
        seconds=attempt.span.seconds,
        ambiguous=not isinstance(attempt, Failed) and claim.journal.response is None,
        tokens=result.usage.total_tokens if result.usage else 0,
        cost_usd=result.cost_usd,
    )
    state = state.with_continuation_outcome(outcome)
    failure = result.errors[0] if result.errors else None
    if not outcome.should_continue:
        ended = _finish(state, outcome)
        return Verdict(
            Move.FINISH,
            state,
            logged,
            outcome,
            ended.stop_reason,
            ended.error,
            dropped=dropped,
            failure=failure,
        )
    delay = _policy_delay(claim, attempt, state, facts)
    return Verdict(
        Move.CONTINUE, state, logged, outcome, delay=delay, dropped=dropped, failure=failure
    )


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


def _with_lost(verdict: Verdict, lost: LostAttempt) -> Verdict:
    return Verdict(
        verdict.move,
        verdict.state,
        outcome=verdict.outcome,
        stop_reason=verdict.stop_reason,
        error=verdict.error,
        lost=lost,
    )


def _may_try_again(claim: Claim, failed: Failed) -> bool:
    return failed.limited or claim.attempts + 1 < claim.config.model_attempts


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
    return LostAttempt(
        kind=kind,
        step=claim.number,
        seconds=attempt.span.seconds,
        ambiguous=unanswered or timed_out,
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
        for record in attempt.records
        if record.error and record.error.code != NOT_EXECUTED
    )
    usage = response.usage or UsageStats()
    return StepResult(
        step=claim.number,
        thought=response.content or None,
        tool_calls=attempt.records,
        usage=usage.model_copy(update={"llm_calls": 1}),
        usage_reported=response.usage is not None,
        cost_usd=attempt.cost_usd,
        finish_reason=response.finish_reason,
        type=_step_type(has_errors=bool(errors), has_tools=bool(attempt.records)),
        errors=errors,
        started_at=span.started_at,
        duration_ms=span.seconds * 1000,
        model=response.model or None,
        worker=facts.worker,
    )


def _step_type(*, has_errors: bool, has_tools: bool) -> StepType:
    if has_errors:
        return StepType.ERROR
    return StepType.TOOL_EXECUTION if has_tools else StepType.FINAL_RESPONSE


def _messages(attempt: Answered | Interrupted) -> tuple[Message, ...]:
    """Return the assistant's message and, behind it, one tool message per call in call order."""
    response = attempt.response
    assert response is not None  # noqa: S101 - decide() has matched the other case
    calls: tuple[ToolCall, ...] = response.tool_calls or ()
    answers = (Message.tool(call, text) for call, text in zip(calls, attempt.texts, strict=True))
    return (Message.assistant(response.content, calls), *answers)
