"""The answer contract's word on whether a run goes on."""

from stepfleet.orchestrator.continuation.protocols import ALLOW, FORBID, REQUEST, evaluation
from stepfleet.orchestrator.records.outcome import (
    ContinuationDecision,
    ContinuationEvaluation,
    StopReason,
)
from stepfleet.orchestrator.records.state import AgentState


class AnswerContractCheck:
    """Forbids more work, as completed, once the answer is given; requests it until then.

    Where no answer is `required`, it has no word before one is given.
    """

    def __init__(self, *, required: bool) -> None:
        self.required = required

    def decide(self, state: AgentState) -> ContinuationDecision:
        """Forbid, request or allow."""
        if state.answer is not None and state.answer.final:
            return FORBID
        return REQUEST if self.required else ALLOW

    def explain(self, state: AgentState) -> ContinuationEvaluation:
        """Return the decision with what there is of the answer."""
        decision = self.decide(state)
        answer = state.answer
        given = answer is not None and answer.text is not None
        if decision is FORBID:
            reason = "the answer was given"
        elif given:
            reason = "the answer's text was given, its data is awaited"
        else:
            reason = "no answer was given yet"
        context = {"given": given, "final": decision is FORBID, "required": self.required}
        stop_reason = StopReason.COMPLETED if decision is FORBID else None
        return evaluation(self, decision, reason, context, stop_reason)
