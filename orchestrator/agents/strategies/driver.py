"""The work driver of a strategy: its `should_continue` as one word in the one decision."""

from stepfleet.orchestrator.continuation.protocols import ALLOW, REQUEST, STOP, evaluation
from stepfleet.orchestrator.records.outcome import ContinuationDecision, ContinuationEvaluation
from stepfleet.orchestrator.records.state import AgentState

GOES_ON = "should_continue"
"""Where the strategy state keeps what the strategy said of the newest turn; missing means no."""


class StrategyContinuation:
    """Requests a step when the strategy asked for one, else says stop.

    A stop ends no tool loop: a request for tools that ran counts more.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def decide(self, state: AgentState) -> ContinuationDecision:
        """Return request or stop; nothing is known before an execution's first step."""
        if state.step_count == 0:
            return ALLOW
        return REQUEST if state.strategy_state.get(GOES_ON) else STOP

    def explain(self, state: AgentState) -> ContinuationEvaluation:
        """Return the decision with the strategy's name."""
        decision = self.decide(state)
        if decision is ALLOW:
            reason = f"{self.name} has seen no step yet"
        else:
            reason = (
                f"{self.name} asks for {'another' if decision is REQUEST else 'no further'} step"
            )
        return evaluation(self, decision, reason, {"strategy": self.name})
