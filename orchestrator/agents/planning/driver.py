"""The work driver of planning: a plan is no answer, so a step follows it."""

from stepfleet.orchestrator.continuation.protocols import REQUEST, STOP, evaluation
from stepfleet.orchestrator.records.outcome import ContinuationDecision, ContinuationEvaluation
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.steps import StepType


class PlanToCarryOut:
    """Requests a step behind a planning turn, else says stop."""

    def decide(self, state: AgentState) -> ContinuationDecision:
        """Return request or stop."""
        last = state.current_step
        planned = state.step_count > 0 and last is not None and last.type is StepType.PLANNING
        return REQUEST if planned else STOP

    def explain(self, state: AgentState) -> ContinuationEvaluation:
        """Return the decision with the steps made."""
        decision = self.decide(state)
        reason = "the last step planned" if decision is REQUEST else "the last step did not plan"
        return evaluation(self, decision, reason, {"steps": state.step_count})
