"""The protocols of a criterion, and the evaluations of our own criteria."""

from typing import Any, Protocol, runtime_checkable

from stepfleet.orchestrator.records.outcome import (
    ContinuationDecision,
    ContinuationEvaluation,
    StopReason,
)
from stepfleet.orchestrator.records.state import AgentState

FORBID = ContinuationDecision.FORBID_CONTINUATION
ALLOW = ContinuationDecision.ALLOW_CONTINUATION
REQUEST = ContinuationDecision.REQUEST_CONTINUATION
STOP = ContinuationDecision.ALLOW_STOP


@runtime_checkable
class CanDecideToContinue(Protocol):
    """A criterion: guards forbid or allow, work drivers request or stop."""

    def decide(self, state: AgentState) -> ContinuationDecision:
        """Return this criterion's decision on `state`."""


@runtime_checkable
class CanExplainContinuation(Protocol):
    """A criterion that gives its decision with a reason and the numbers behind it."""

    def explain(self, state: AgentState) -> ContinuationEvaluation:
        """Return the decision on `state`, explained."""


def explains(criterion: object) -> bool:
    """Return whether a criterion gives reasons (the protocol's own check is slow)."""
    return callable(getattr(criterion, "explain", None))


def evaluation(
    criterion: object,
    decision: ContinuationDecision,
    reason: str,
    context: dict[str, Any],
    stop_reason: StopReason | None = None,
) -> ContinuationEvaluation:
    """Return an evaluation by `criterion`; the values are known to be valid."""
    return ContinuationEvaluation.model_construct(
        criterion=type(criterion).__name__,
        decision=decision,
        reason=reason,
        context=context,
        stop_reason=stop_reason,
    )
