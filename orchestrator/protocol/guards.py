"""Decides whether no model call is made: limits, a cancel or poison forbid it, or none is due."""

from stepfleet.orchestrator.continuation import ContinuationCriteria, StopRequested
from stepfleet.orchestrator.continuation.collection import outcome_of
from stepfleet.orchestrator.protocol.claim import Claim, Stance
from stepfleet.orchestrator.records.outcome import (
    ContinuationDecision,
    ContinuationEvaluation,
    ContinuationOutcome,
    StopReason,
)


def prevented(claim: Claim, criteria: ContinuationCriteria) -> ContinuationOutcome | None:
    """Return the outcome that ends the run without this step's call, or None.

    The criteria are evaluated before the first step of an execution, before a step that was
    delayed, and where a run was resumed; otherwise the last commit has just done so. A run that
    had its answer and is resumed completes: nothing is sent after the answer. A budget of the
    fleet that is spent is known before the call alone.
    """
    if claim.exhausted is not None and claim.state.stop_requested is None:
        return outcome_of((claim.exhausted.evaluation(),))
    failures = claim.state.failures.consecutive_failures
    if claim.journal.spent and claim.state.stop_requested is None:
        return None  # the call was made before the step waited for its tools
    again = claim.attempts or claim.limited or claim.crashes or failures
    delayed = again or claim.state.stop_requested is not None
    if claim.state.step_count and claim.decided and not delayed:
        return None
    outcome = criteria.evaluate(claim.state)
    if outcome.decision is ContinuationDecision.FORBID_CONTINUATION:
        return outcome
    if outcome.should_continue or claim.decided or not claim.state.step_count:
        return None
    has_answer = all(one.is_assistant() for one in claim.state.messages[-1:])
    return outcome if has_answer and outcome.stop_reason is StopReason.COMPLETED else None


def cancelled_outcome(note: str) -> ContinuationOutcome:
    """Return the outcome of a run that was cancelled while no worker held it."""
    return outcome_of((StopRequested.because(note),))


def dependency_outcome(why: str) -> ContinuationOutcome:
    """Return the outcome of a run that did not begin, as a run before it did not complete."""
    evaluation = ContinuationEvaluation(
        criterion="Dependency",
        decision=ContinuationDecision.FORBID_CONTINUATION,
        reason=why,
        stop_reason=StopReason.ERROR,
    )
    return outcome_of((evaluation,))


def poisoned(claim: Claim, limit: int) -> ContinuationOutcome | None:
    """Return the outcome that ends a run whose step has ended its workers, or None.

    `limit` is how many may be lost with it before it is given up (see `suspicion`).
    """
    if claim.losses.suspicion(limit).stance is not Stance.PROVEN:
        return None
    reason = (
        f"step {claim.number} ended its worker {claim.crashes} times"
        f"{_running_tool(claim)}; it is not tried again"
    )
    evaluation = ContinuationEvaluation(
        criterion="PoisonLimit",
        decision=ContinuationDecision.FORBID_CONTINUATION,
        reason=reason,
        context={"step": claim.number, "crashes": claim.crashes, "limit": limit},
        stop_reason=StopReason.ERROR,
    )
    return outcome_of((evaluation,))


def _running_tool(claim: Claim) -> str:
    response = claim.journal.response
    if response is None or not response.tool_calls:
        return " during its model call"
    running = sorted(claim.journal.started - claim.journal.results.keys())
    names = ", ".join(response.tool_calls[index].name for index in running)
    return f" while tool {names} ran" if names else " after its tools"
