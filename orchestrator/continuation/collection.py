"""Combines many criteria into one outcome.

Forbid beats request, request beats stop, stop beats allow. Knows decisions, not their reasons.
"""

from collections.abc import Iterator

from stepfleet.orchestrator.continuation.guards import (
    ALLOW,
    FORBID,
    REQUEST,
    STOP,
    CanDecideToContinue,
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
from stepfleet.orchestrator.records.steps import StepType
from stepfleet.orchestrator.records.text.redaction import redact_error
from stepfleet.orchestrator.records.text.tracebacks import traceback_of

AGGREGATE = "aggregate"


class ContinuationCriteria:
    """A set of criteria; sets nest. All are evaluated, also after one that forbids."""

    def __init__(self, *criteria: "CanDecideToContinue | ContinuationCriteria") -> None:
        self.criteria = criteria
        self._each = tuple((one, explains(one), _is_ours(one)) for one in self)

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
        evaluations = tuple(_evaluate(one, state, how, ours) for one, how, ours in self._each)
        outcome = outcome_of(evaluations)
        if outcome.should_continue or not _last_step_failed(state):
            return outcome
        if run_status(outcome.stop_reason) is RunStatus.COMPLETED:
            return outcome.model_copy(update={"stop_reason": StopReason.ERROR})
        return outcome

    def forbids(self, state: AgentState) -> bool:
        """Return whether a criterion forbids; our own do not build their reasons here."""
        return any(_forbids(one, state, how, ours) for one, how, ours in self._each)

    def can_continue(self, state: AgentState) -> bool:
        """Return whether the run may go on."""
        return self.evaluate(state).should_continue

    def decide(self, state: AgentState) -> ContinuationDecision:
        """Return the combined decision of all criteria."""
        return self.evaluate(state).decision


def outcome_of(evaluations: tuple[ContinuationEvaluation, ...]) -> ContinuationOutcome:
    """Return the outcome of `evaluations`; their order only decides which criterion is named."""
    first: dict[ContinuationDecision, ContinuationEvaluation] = {}
    for one in evaluations:
        first.setdefault(one.decision, one)
    decision, goes_on, resolved_by, reason = STOP, False, AGGREGATE, StopReason.COMPLETED
    if FORBID in first:
        decision, resolved_by = FORBID, first[FORBID].criterion
        reason = first[FORBID].stop_reason or StopReason.GUARD
    elif REQUEST in first:
        decision, goes_on, resolved_by = REQUEST, True, first[REQUEST].criterion
    elif STOP not in first and ALLOW in first:
        decision, goes_on = REQUEST, True
    return ContinuationOutcome.model_construct(
        decision=decision,
        should_continue=goes_on,
        resolved_by=resolved_by,
        stop_reason=reason,
        evaluations=evaluations,
    )


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


def _forbids(
    criterion: CanDecideToContinue, state: AgentState, explained: bool, ours: bool
) -> bool:
    if not ours:
        return _evaluate(criterion, state, explained, ours).decision is FORBID
    try:
        return criterion.decide(state) is FORBID
    except Exception:  # noqa: BLE001 - one that raises forbids
        return True


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
