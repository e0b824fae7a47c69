"""Combines many criteria into one outcome.

Forbid beats request, request beats stop, stop beats allow. A limit that was reached when nothing
was left to do has prevented nothing, and does not count. Knows decisions, not their reasons.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence

from stepfleet.orchestrator.continuation.drivers import PendingRetry, ToolCallPresenceCheck
from stepfleet.orchestrator.continuation.error_policy import (
    ErrorContextResolver,
    ErrorPolicy,
    ErrorPolicyCriterion,
    resolve,
)
from stepfleet.orchestrator.continuation.guards import (
    ALLOW,
    FORBID,
    REQUEST,
    STOP,
    BudgetLimit,
    CanDecideToContinue,
    CumulativeExecutionTimeLimit,
    ExecutionTimeLimit,
    FinishReasonCheck,
    Maximum,
    StepsLimit,
    StopRequested,
    TokenUsageLimit,
    explains,
)
from stepfleet.orchestrator.records.base import well_formed
from stepfleet.orchestrator.records.outcome import (
    ContinuationDecision,
    ContinuationEvaluation,
    ContinuationOutcome,
    StopReason,
)
from stepfleet.orchestrator.records.run.results import RunStatus, run_status
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.steps import FinishReason, StepType
from stepfleet.orchestrator.records.text.redaction import redact_error
from stepfleet.orchestrator.records.text.tracebacks import traceback_of

AGGREGATE = "aggregate"


class ContinuationCriteria:
    """A set of criteria; sets nest. All are evaluated, also after a forbidding one."""

    def __init__(self, *criteria: "CanDecideToContinue | ContinuationCriteria") -> None:
        self.criteria = criteria
        self._each = tuple((one, explains(one), _is_ours(one)) for one in self)
        each = enumerate(self)
        self._limits = {at: one for at, one in each if isinstance(one, Maximum)}

    def __iter__(self) -> Iterator[CanDecideToContinue]:
        for criterion in self.criteria:
            if isinstance(criterion, ContinuationCriteria):
                yield from criterion
            else:
                yield criterion

    def evaluate(self, state: AgentState) -> ContinuationOutcome:
        """Return the outcome for `state`. A criterion that raises forbids, with reason `error`.

        A run whose last step failed never completes: where nothing else is wrong with it, its
        stop reason becomes `error`.
        """
        evaluations = tuple([_evaluate(one, state, how, ours) for one, how, ours in self._each])
        reached = {at: one for at, one in self._limits.items() if _is_reached(evaluations[at])}
        outcome = outcome_of(evaluations, reached)
        if outcome.should_continue or run_status(outcome.stop_reason) is not RunStatus.COMPLETED:
            return outcome
        if _last_step_failed(state):
            return outcome.model_copy(update={"stop_reason": StopReason.ERROR})
        return _with_idle(outcome, reached) if reached else outcome

    def forbids(self, state: AgentState) -> bool:
        """Return whether a criterion ends the run; our own do not build their reasons here."""
        decisions = [_decision(one, state, how, ours) for one, how, ours in self._each]
        return _resolved(decisions, self._limits)[0] is FORBID

    def can_continue(self, state: AgentState) -> bool:
        """Return whether the run may go on."""
        return self.evaluate(state).should_continue

    def decide(self, state: AgentState) -> ContinuationDecision:
        """Return the combined decision of all criteria."""
        return self.evaluate(state).decision


def outcome_of(
    evaluations: tuple[ContinuationEvaluation, ...], limits: Collection[int] = ()
) -> ContinuationOutcome:
    """Return the outcome of `evaluations`; their order only decides which criterion is named.

    `limits` are the positions of limits.
    """
    decision, at = _resolved([one.decision for one in evaluations], limits)
    decisive = None if at is None else evaluations[at]
    reason = StopReason.COMPLETED
    if decisive is not None and decision is FORBID:
        reason = decisive.stop_reason or StopReason.GUARD
    # In the order in which they are stored.
    return ContinuationOutcome.of_fields(
        {
            "stop_reason": reason,
            "evaluations": evaluations,
            "decision": decision,
            "should_continue": decision is REQUEST,
            "resolved_by": decisive.criterion if decisive else AGGREGATE,
        }
    )


def _resolved(
    decisions: Sequence[ContinuationDecision], limits: Collection[int]
) -> tuple[ContinuationDecision, int | None]:
    """Return the decision of all, and the position of the one that makes it by itself.

    Limits count unless a driver says that no work is left, and none requests more.
    """
    counting: Sequence[ContinuationDecision | None] = decisions
    if REQUEST not in decisions and STOP in decisions:
        counting = [None if at in limits else one for at, one in enumerate(decisions)]
    for strongest in (FORBID, REQUEST):
        if strongest in counting:
            return strongest, counting.index(strongest)
    return (REQUEST if STOP not in counting and ALLOW in counting else STOP), None


def _is_reached(evaluation: ContinuationEvaluation) -> bool:
    """Return whether a limit forbids: not if it failed by itself."""
    return evaluation.decision is FORBID and evaluation.stop_reason is not StopReason.ERROR


def _with_idle(outcome: ContinuationOutcome, reached: dict[int, Maximum]) -> ContinuationOutcome:
    """Return a completed run's outcome, in which limits say that they prevented nothing."""
    evaluations = tuple(
        limit.idle(one) if (limit := reached.get(at)) else one
        for at, one in enumerate(outcome.evaluations)
    )
    return outcome.model_copy(update={"evaluations": evaluations})


def _evaluate(
    criterion: CanDecideToContinue, state: AgentState, explained: bool, ours: bool
) -> ContinuationEvaluation:
    try:
        if not explained:
            decision = ContinuationDecision(criterion.decide(state))
            return ContinuationEvaluation.from_decision(type(criterion).__name__, decision)
        evaluation: ContinuationEvaluation = criterion.explain(state)  # type: ignore[attr-defined]
        return evaluation if ours else _storable(evaluation)
    except Exception as error:  # noqa: BLE001 - users write criteria; none may lose a run
        return _failure_of(criterion, error)


def _decision(
    criterion: CanDecideToContinue, state: AgentState, explained: bool, ours: bool
) -> ContinuationDecision:
    if not ours:
        return _evaluate(criterion, state, explained, ours).decision
    try:
        return criterion.decide(state)
    except Exception:  # noqa: BLE001 - one that raises forbids
        return FORBID


def _failure_of(criterion: object, error: Exception) -> ContinuationEvaluation:
    name = type(criterion).__name__
    if not callable(getattr(criterion, "decide", None)):
        what = "it has no method decide(state); a plain function becomes a criterion by when(...)"
    else:
        what = redact_error(well_formed(f"{type(error).__name__}: {error}"))
    return ContinuationEvaluation(
        criterion=name,
        decision=FORBID,
        reason=f"criterion {name} failed: {what}",
        context={"exception": type(error).__name__},
        stop_reason=StopReason.ERROR,
        traceback=traceback_of(error),
    )


def _storable(evaluation: object) -> ContinuationEvaluation:
    """Return the evaluation as it will be read back; raises where it cannot be stored."""
    if not isinstance(evaluation, ContinuationEvaluation):
        msg = f"explain() returned {type(evaluation).__name__}, not a ContinuationEvaluation"
        raise TypeError(msg)
    return ContinuationEvaluation.from_json(evaluation.to_json())


def _is_ours(criterion: object) -> bool:
    return type(criterion).__module__.startswith(f"{__package__}.")


def _last_step_failed(state: AgentState) -> bool:
    last = state.current_step
    return state.step_count > 0 and last is not None and last.type is StepType.ERROR


def base_criteria(  # noqa: PLR0913 - one argument per limit
    *,
    max_steps: int = 10,
    token_limit: int | None = 32_768,
    time_limit: float | None = 300.0,
    cumulative_timeout: float | None = None,
    budget_usd: float | None = None,
    error_policy: ErrorPolicy | None = None,
    finish_reasons: Iterable[FinishReason] = (),
    resolver: ErrorContextResolver = resolve,
    leading: Iterable[CanDecideToContinue] = (),
    extra: Iterable[CanDecideToContinue] = (),
) -> ContinuationCriteria:
    """Return the base set with these limits, followed by the user's criteria.

    A cumulative timeout replaces the wall-clock limit; None switches a limit off. `leading`
    stands before the limits: the criteria of an agent's reasoner for its answer.
    """
    policy = error_policy or ErrorPolicy()
    # First, so that a cancelled run ends as cancelled whatever else forbids.
    criteria: list[CanDecideToContinue] = [StopRequested(), *leading, StepsLimit(max_steps)]
    if token_limit is not None:
        criteria.append(TokenUsageLimit(token_limit))
    if cumulative_timeout is not None:
        criteria.append(CumulativeExecutionTimeLimit(cumulative_timeout))
    elif time_limit is not None:
        criteria.append(ExecutionTimeLimit(time_limit))
    criteria += [
        ErrorPolicyCriterion(policy, resolver),
        FinishReasonCheck(finish_reasons),
        ToolCallPresenceCheck(),
        PendingRetry(policy, resolver),
    ]
    if budget_usd is not None:
        criteria.append(BudgetLimit(budget_usd))
    return ContinuationCriteria(*criteria, *extra)
