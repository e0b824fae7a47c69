"""Decides the next move of a run after an attempt at a step. No other module does.

Limits of the fleet may change when a retry starts (`worker/runtime/admission/admitted_steps.py`).

Pure: clocks, randomness and prices come in as arguments.
"""

from dataclasses import replace
from datetime import datetime, timedelta
from enum import StrEnum
from hashlib import sha256

from stepfleet.orchestrator.continuation import ContinuationCriteria
from stepfleet.orchestrator.continuation.error_policy import ErrorHandlingDecision
from stepfleet.orchestrator.errors import LONGEST_WISH
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
from stepfleet.orchestrator.protocol.claim import Claim, Outage
from stepfleet.orchestrator.protocol.fold import after_step
from stepfleet.orchestrator.protocol.lost_attempts import (
    in_vain,
    late,
    lost_attempt,
    lost_use,
    remembered_of,
)
from stepfleet.orchestrator.protocol.waiting import Waiting, patience, within_time
from stepfleet.orchestrator.records.calls.tools import (
    DENIED,
    NOT_EXECUTED,
    ToolCall,
    with_few_tracebacks,
)
from stepfleet.orchestrator.records.conversation.messages import Message, media_messages
from stepfleet.orchestrator.records.errors import ErrorInfo, ErrorType, ModelErrorCode
from stepfleet.orchestrator.records.memory_window import Summary
from stepfleet.orchestrator.records.outcome import ContinuationOutcome, StopReason
from stepfleet.orchestrator.records.run.results import LostAttempt, LostKind, RunStatus, run_status
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.steps import FinishReason, LoggedStep, StepResult, StepType
from stepfleet.orchestrator.records.usage import Spent, UsageStats, sum_usd
from stepfleet.orchestrator.records.values import value_class

LONGEST_WAIT = 3600.0
"""Seconds after which a step looks by itself, in case that its circuit was lost."""


def circuit_id(service: str) -> str:
    """Return the id of a service's circuit."""
    return sha256(service.encode(errors="replace")).hexdigest()[:12]


def parked(
    claim: Claim, failed: Failed, now: datetime, jitter: float, patience: float
) -> tuple[Outage, float]:
    """Return the wait of the step, and the seconds after which it ends by itself."""
    since = claim.outage.since if claim.outage else now
    left = (since + timedelta(seconds=patience) - now).total_seconds()
    return Outage(since, failed.outage), max(0.0, min(LONGEST_WAIT * (0.5 + jitter / 2), left))


def gave_up(claim: Claim, failed: Failed, now: datetime, patience: float) -> ErrorInfo | None:
    """Return the error of a step that has waited for too long; None while it may wait."""
    waited = (now - claim.outage.since).total_seconds() if claim.outage else 0.0
    if waited < patience:
        return None
    text = (
        f"the step has waited {waited:.0f} s for a model that is out (outage_patience is "
        f"{patience:g} s): {failed.error.message}"
    )
    return failed.error.model_copy(update={"message": text, "retryable": False})


BASE = 1.0
FACTOR = 3.0
LONGEST = 120.0
_ENOUGH = 10

NO_FAILURES = frozenset({DENIED, NOT_EXECUTED})


def backoff(failures: int, *, retry_after: float | None, jitter: float) -> float:
    """Return the wait after the `failures`-th failure in a row (from 1).

    Exponential from a second to two minutes, times 0.5 to 1 by `jitter` (0 to 1); never less
    than the provider's `retry_after` (an hour at most), to which up to a tenth is added so
    that waiting runs do not come back in one wave.
    """
    exponent = min(max(failures - 1, 0), _ENOUGH)
    wait = min(BASE * FACTOR**exponent, LONGEST) * (0.5 + jitter / 2)
    if retry_after is None:
        return wait
    return max(wait, min(retry_after, LONGEST_WISH) * (1 + jitter / 10))


class Move(StrEnum):
    """The five moves of a commit."""

    CONTINUE = "continue"
    RETRY = "retry"
    FINISH = "finish"
    RELEASE = "release"
    WAIT = "wait"


@value_class(frozen=True, slots=True)
class Verdict:
    """What the commit writes.

    `logged` is None for an attempt without a step. `delay` is in seconds. `lost` is paid work that
    is dropped now; `dropped` is the entry for a commit that comes too late; `failed` has those of
    the attempt's further calls, after the `entered` that it has noted before. `attempt` and
    `limited` are the price of a retry. `waiting` is set when the step waits for tool calls; then
    `lost` is the entry for a wait that is ended from outside. `guess` has the prices of calls of
    this step whose answers were lost, where these were not known before: one for each model, the
    first also for calls whose model is not known. `hold` is the number of the request that holds
    the run's batch. `outage` is set when the step waits for services that are out. `refused` names
    the model where its provider refused the call for now (429), then `retry_after` is its wish in
    seconds; with `unsent` the call was not made, since others of the model had just been refused.
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
    failed: tuple[LostAttempt, ...] = ()
    entered: int = 0
    guess: tuple[Spent, ...] = ()
    failure: ErrorInfo | None = None
    waiting: Waiting | None = None
    hold: int = 0
    outage: Outage | None = None
    refused: str = ""
    unsent: bool = False
    retry_after: float | None = None


@value_class(frozen=True, slots=True)
class Facts:
    """Facts that a decision needs besides the claim and the attempt.

    `now` is Redis's time; `jitter` lies between 0 and 1; `worker` is the name of the worker;
    `patience` the seconds that a step waits for a service that is out.
    """

    now: datetime
    jitter: float = 0.5
    worker: str | None = None
    patience: float = 86_400.0


def decide(claim: Claim, attempt: Attempt, criteria: ContinuationCriteria, facts: Facts) -> Verdict:
    """Return the verdict on `attempt`. Evaluates the criteria with the step's time added."""
    match attempt:
        case Prevented():
            return _finish(claim.state, attempt.outcome)
        case Failed() if attempt.transient and _may_be_deferred(claim, attempt):
            return _deferred(claim, attempt, criteria, facts)
        case Interrupted(by=Interruption.HANDED_BACK) | Interrupted(by=Interruption.LEASE_LOST):
            lost = lost_attempt(claim, attempt, LostKind.INTERRUPTED)
            return Verdict(Move.RELEASE, claim.state, lost=lost)
        case Parked():
            return _parked(claim, attempt, criteria, facts)
        case (Answered() as done) | (Failed() as done) | Interrupted(answer=Answered() as done):
            return _committed(claim, done, criteria, facts)
        case _:
            lost = lost_attempt(claim, attempt, LostKind.INTERRUPTED)
            return replace(_finish(claim.state, criteria.evaluate(claim.state)), lost=lost)


def _committed(
    claim: Claim,
    attempt: Answered | Failed,
    criteria: ContinuationCriteria,
    facts: Facts,
) -> Verdict:
    lost = in_vain(claim, attempt)
    state, logged = _logged(claim, attempt, lost, criteria, facts)
    result, outcome = logged.result, logged.outcome
    assert outcome is not None  # noqa: S101 - each step is logged with one
    goes_on = outcome.should_continue
    if not goes_on:  # those who hear of the end get the state with its outcome
        state = state.model_copy(update={"last_continuation_outcome": outcome})
    return Verdict(
        Move.CONTINUE if goes_on else Move.FINISH,
        state,
        logged,
        outcome,
        stop_reason=None if goes_on else outcome.stop_reason,
        error=None if goes_on else _error_of(outcome),
        delay=_policy_delay(claim, attempt, state, facts) if goes_on else 0.0,
        lost=lost,
        dropped=late(claim, attempt, result),
        failure=result.errors[0] if result.errors else None,
    )


def _logged(
    claim: Claim,
    attempt: Answered | Failed,
    lost: LostAttempt | None,
    criteria: ContinuationCriteria,
    facts: Facts,
) -> tuple[AgentState, LoggedStep]:
    """Return the state after the step, and the step as it is logged, with its outcome."""
    result = _step_result(claim, attempt, facts)
    remembered = remembered_of(attempt)
    if remembered and remembered.summary:
        result = _charged(result, remembered.summary)
    progress = None if isinstance(attempt, Failed) else attempt.progress
    messages = () if isinstance(attempt, Failed) else _messages(attempt)
    if progress:
        messages += progress.messages
        failed = progress.error and progress.error.without_traceback()
        # The step's result has the refusal.
        progress = progress.model_copy(update={"messages": (), "error": failed, "refused": ""})
    handoff = None if isinstance(attempt, Failed) else attempt.handoff
    before = claim.state.with_lost(lost_use((lost,)))
    state = after_step(before, result, messages, facts.now, progress, remembered, handoff)
    outcome = criteria.evaluate(state)
    logged = LoggedStep.model_construct(
        result=result,
        messages=messages,
        outcome=outcome,
        execution=state.info.execution,
        committed_at=facts.now,
        progress=progress,
        remembered=remembered,
        handoff=handoff,
    )
    return state, logged


def _charged(result: StepResult, summary: Summary) -> StepResult:
    """Return the result with the tokens and the cost of the summary made in that step."""
    usage = (result.usage or UsageStats()) + summary.usage
    cost = sum_usd(result.cost_usd, summary.cost_usd)
    return result.model_copy(update={"usage": usage, "cost_usd": cost})


def _finish(state: AgentState, outcome: ContinuationOutcome) -> Verdict:
    """End the run with the stop reason of `outcome`, also where that does not forbid more work."""
    return Verdict(
        Move.FINISH,
        state.with_continuation_outcome(outcome),
        outcome=outcome,
        stop_reason=outcome.stop_reason,
        error=_error_of(outcome),
    )


def _error_of(outcome: ContinuationOutcome) -> str | None:
    return outcome.reason if run_status(outcome.stop_reason) is RunStatus.ERROR else None


def _parked(claim: Claim, attempt: Parked, criteria: ContinuationCriteria, facts: Facts) -> Verdict:
    if claim.state.stop_requested is not None:
        return _committed(claim, attempt.answer, criteria, facts)
    response = attempt.answer.response
    usage = response.usage
    paid = LostAttempt(
        kind=LostKind.INTERRUPTED,
        step=claim.number,
        seconds=attempt.span.seconds,
        tokens=usage.total_tokens if usage else 0,
        cost_usd=attempt.answer.cost_usd,
        model=response.model or None,
        usage=usage,
        service_tier=response.service_tier,
    )
    seconds = attempt.span.seconds - claim.journal.spent
    late = paid.model_copy(update={"kind": LostKind.LATE, "seconds": seconds})
    waiting = Waiting(
        calls=attempt.waits,
        patience=patience(claim.config, claim.state, facts.now),
        seconds=seconds,
        began=attempt.span.started_at,
    )
    return Verdict(Move.WAIT, claim.state, lost=paid, dropped=late, waiting=waiting)


def _out(claim: Claim, failed: Failed, criteria: ContinuationCriteria, facts: Facts) -> Verdict:
    """Let a step wait for a service that is out: no attempt of its own has failed."""
    if (error := gave_up(claim, failed, facts.now, facts.patience)) is not None:
        return _committed(claim, replace(failed, error=error), criteria, facts)
    outage, delay = parked(claim, failed, facts.now, facts.jitter, facts.patience)
    called = failed.error.code != ModelErrorCode.CIRCUIT_OPEN or failed.spent
    return Verdict(
        Move.RETRY,
        claim.state,
        delay=delay,
        lost=lost_attempt(claim, failed, LostKind.DEFERRED, failed.error) if called else None,
        failure=failed.error,
        outage=outage,
    )


def _may_be_deferred(claim: Claim, failed: Failed) -> bool:
    stopped = claim.state.stop_requested is not None
    return (
        stopped
        or failed.limited
        or bool(failed.outage)
        or claim.attempts + 1 < claim.config.model_attempts
    )


def _deferred(
    claim: Claim, failed: Failed, criteria: ContinuationCriteria, facts: Facts
) -> Verdict:
    if claim.state.stop_requested is None and failed.outage:
        return _out(claim, failed, criteria, facts)
    if claim.state.stop_requested is None:
        return _try_again(claim, failed, facts)
    lost = lost_attempt(claim, failed, LostKind.DEFERRED)
    return replace(_finish(claim.state, criteria.evaluate(claim.state)), lost=lost)


def _try_again(claim: Claim, failed: Failed, facts: Facts) -> Verdict:
    failures = claim.attempts + claim.limited + 1
    delay = backoff(failures, retry_after=failed.retry_after, jitter=facts.jitter)
    return Verdict(
        Move.RETRY,
        claim.state,
        delay=within_time(delay, claim.config, claim.state, facts.now),
        attempt=not failed.limited,
        limited=failed.limited,
        lost=lost_attempt(claim, failed, LostKind.DEFERRED, failed.error),
        dropped=lost_attempt(claim, failed, LostKind.LATE),
        refused=failed.refused,
        unsent=failed.unsent,
        retry_after=failed.retry_after,
        failure=failed.error,
    )


def _policy_delay(claim: Claim, attempt: Attempt, state: AgentState, facts: Facts) -> float:
    """Return the delay of a retry by the error policy; 0 when only tools failed."""
    if not isinstance(attempt, Failed):
        return 0.0
    if claim.config.error_policy.decide(state.failures) is not ErrorHandlingDecision.RETRY:
        return 0.0
    failures = state.failures.consecutive_failures
    delay = backoff(failures, retry_after=attempt.retry_after, jitter=facts.jitter)
    return within_time(delay, claim.config, state, facts.now)


def _step_result(claim: Claim, attempt: Answered | Failed, facts: Facts) -> StepResult:
    span: Span = attempt.span
    if isinstance(attempt, Failed):
        return StepResult(
            step=claim.number,
            finish_reason=attempt.finish_reason or FinishReason.ERROR,
            type=StepType.ERROR,
            errors=(attempt.error,),
            usage_reported=False,
            started_at=span.started_at,
            duration_ms=span.seconds * 1000,
            worker=facts.worker,
            waited_seconds=claim.waited,
            waited_for=claim.waited_for,
        )
    response = attempt.response
    errors = tuple(
        record.error.without_traceback()
        for index, record in enumerate(attempt.records)
        if record.error and record.error.code not in NO_FAILURES and index not in attempt.handled
    )
    progress = attempt.progress
    if progress and progress.error:
        errors += (progress.error,)
    paused = response.finish_reason is FinishReason.PAUSE  # among the provider's own tools
    step_type = _step_type(has_errors=bool(errors), has_tools=bool(attempt.records) or paused)
    if progress and progress.step_type and not errors:
        step_type = progress.step_type
    usage = response.usage or UsageStats()
    if response.cache is None or not response.cache.hit:
        usage = usage.model_copy(update={"llm_calls": 1})
    return StepResult.model_construct(
        step=claim.number,
        thought=response.content or None,
        tool_calls=with_few_tracebacks(attempt.records),
        usage=usage,
        usage_reported=response.usage is not None and not response.usage_estimated,
        cost_usd=attempt.cost_usd,
        finish_reason=response.finish_reason,
        type=step_type,
        errors=errors,
        started_at=span.started_at,
        duration_ms=span.seconds * 1000,
        model=response.model or (response.fallback or claim.config).model,
        worker=facts.worker,
        cache=response.cache,
        fallback=response.fallback,
        reasoning=response.reasoning_text,
        request_id=response.request_id,
        service_tier=response.service_tier,
        waited_seconds=claim.waited,
        waited_for=claim.waited_for,
        refused=progress.refused if progress else "",
    )


def _step_type(*, has_errors: bool, has_tools: bool) -> StepType:
    if has_errors:
        return StepType.ERROR
    return StepType.TOOL_EXECUTION if has_tools else StepType.FINAL_RESPONSE


def _messages(attempt: Answered) -> tuple[Message, ...]:
    """Return the assistant's message, then one tool message per call in call order.

    Images that tools returned stand in one message more.
    """
    response = attempt.response
    calls: tuple[ToolCall, ...] = response.tool_calls or ()
    answers = [Message.tool(call, text) for call, text in zip(calls, attempt.texts, strict=True)]
    shown = media_messages(attempt.records)
    return (Message.assistant(response.as_content, calls), *answers, *shown)


_OF_THE_INPUT = frozenset({ModelErrorCode.CONTEXT_OVERFLOW, ModelErrorCode.CONTENT_FILTER})
"""Permanent errors of one conversation: others of the batch may well complete."""


def holding_error(claim: Claim, attempt: Attempt | None, verdict: Verdict) -> ErrorInfo | None:
    """Return the permanent error with which a run of a batch is about to end; None otherwise.

    Permanent are errors before or in a model call that a repetition would meet again: a refused
    key, an unknown model, a refused request, code of the agent that raises. A tool's error may be
    that of one input.
    """
    if claim.batch_id is None or verdict.move is not Move.FINISH or verdict.error is None:
        return None
    if not isinstance(attempt, Failed) or attempt.transient or attempt.spent:
        return None
    error = attempt.error
    is_of_all = error.type in (ErrorType.MODEL, ErrorType.UNKNOWN) and not error.retryable
    return error if is_of_all and error.code not in _OF_THE_INPUT else None


def held(claim: Claim, number: int) -> Verdict:
    """Return the verdict on a step that waits until its batch is resumed, to be done again."""
    return Verdict(Move.RELEASE, claim.state, hold=number)
