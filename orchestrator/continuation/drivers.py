"""Work drivers: criteria that request another step, and criteria made of a plain function.

They decide whether work is left, never whether a limit allows it.
"""

from collections.abc import Callable

from stepfleet.orchestrator.continuation.error_policy import (
    ErrorContextResolver,
    ErrorHandlingDecision,
    ErrorPolicy,
    resolve,
)
from stepfleet.orchestrator.continuation.protocols import ALLOW, REQUEST, STOP, evaluation
from stepfleet.orchestrator.records.outcome import ContinuationDecision, ContinuationEvaluation
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.steps import StepType


class ToolCallPresenceCheck:
    """Requests the first step of an execution, and a further one while the model calls tools."""

    def decide(self, state: AgentState) -> ContinuationDecision:
        """Request when no step was made yet or the last one called tools."""
        last = state.current_step
        if state.step_count == 0 or last is None or last.has_tool_calls:
            return REQUEST
        return STOP

    def explain(self, state: AgentState) -> ContinuationEvaluation:
        """Return the decision with its reason."""
        decision = self.decide(state)
        if state.step_count == 0:
            reason = "no step was made yet"
        elif decision is REQUEST:
            reason = "the last step called tools; the model has to see their results"
        else:
            reason = "the last step called no tools"
        return evaluation(self, decision, reason, {"steps": state.step_count})


class PendingRetry:
    """Requests another step when there was a failure that the policy does not stop at.

    A retry is requested whenever the policy retries: a failed model call has no tool calls,
    and without this the run would end as completed. An *ignored* failure of a step is
    requested again too, because a failed step has no answer to complete with; the other
    limits bound it. (After ignored tool failures the model sees their messages next.)
    """

    def __init__(self, policy: ErrorPolicy, resolver: ErrorContextResolver = resolve) -> None:
        self.policy = policy
        self.resolver = resolver

    def decide(self, state: AgentState) -> ContinuationDecision:
        """Request on a failure that the policy retries, and on a failed step that it ignores."""
        return self._look(state)[0]

    def explain(self, state: AgentState) -> ContinuationEvaluation:
        """Return the decision with the number of failures."""
        decision, handling, failures = self._look(state)
        if decision is REQUEST:
            reason = f"the last step failed and the policy says {handling.value}: another is made"
        elif failures:
            reason = "the last step failed and the policy stops"
        else:
            reason = "the last step did not fail"
        return evaluation(self, decision, reason, {"consecutiveFailures": failures})

    def _look(self, state: AgentState) -> tuple[ContinuationDecision, ErrorHandlingDecision, int]:
        context = self.resolver(state)
        handling = self.policy.decide(context)
        last = state.current_step
        failed = state.step_count > 0 and last is not None and last.type is StepType.ERROR
        retried = handling is ErrorHandlingDecision.RETRY
        ignored = failed and handling is ErrorHandlingDecision.IGNORE
        return REQUEST if retried or ignored else STOP, handling, context.consecutive_failures


class ResponseContentCheck:
    """Requests another step while a predicate over the last answer's text is true."""

    def __init__(self, needs_more: Callable[[str], bool]) -> None:
        self.needs_more = needs_more

    def decide(self, state: AgentState) -> ContinuationDecision:
        """Allow before the first answer; then request or stop by the predicate."""
        last = state.current_step
        if last is None or last.text is None:
            return ALLOW
        return REQUEST if self.needs_more(last.text) else STOP


class CallableCriterion:
    """A criterion made of a function; `when` makes one."""

    def __init__(self, function: Callable[[AgentState], ContinuationDecision]) -> None:
        self.function = function

    def decide(self, state: AgentState) -> ContinuationDecision:
        """Return what the function returns."""
        return ContinuationDecision(self.function(state))

    def explain(self, state: AgentState) -> ContinuationEvaluation:
        """Return the decision with the function's name."""
        decision = self.decide(state)
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return evaluation(self, decision, f"{name} says {decision.value}", {"function": name})


def when(function: Callable[[AgentState], ContinuationDecision]) -> CallableCriterion:
    """Return a criterion whose decision is the function's; a forbid stops with reason `guard`."""
    return CallableCriterion(function)
