"""Work drivers: criteria that request another step, and criteria made of a plain function.

They decide whether work is left, never whether a limit allows it.
"""

from collections.abc import Callable, Iterator

from stepfleet.orchestrator.continuation.error_policy import (
    ErrorContextResolver,
    ErrorHandlingDecision,
    ErrorPolicy,
    resolve,
)
from stepfleet.orchestrator.continuation.guards import ALLOW, FORBID, REQUEST, STOP, evaluation
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.outcome import (
    ContinuationDecision,
    ContinuationEvaluation,
    StopReason,
)
from stepfleet.orchestrator.records.state import AgentState, LastStep
from stepfleet.orchestrator.records.steps import FinishReason, StepType


class SelfCritique:
    """Requests another answer while `needs_revision` is true for the newest one's text.

    After `revisions` of them it forbids, with stop reason `retry_limit`. Steps that called tools,
    planned or failed are not answers, and are allowed.
    """

    def __init__(self, needs_revision: Callable[[str], bool], revisions: int = 2) -> None:
        self.needs_revision = needs_revision
        self.revisions = revisions

    def decide(self, state: AgentState) -> ContinuationDecision:
        """Request, forbid after the last revision, or stop."""
        return self._look(state)[0]

    def explain(self, state: AgentState) -> ContinuationEvaluation:
        """Return the decision with the number of answers and of allowed revisions."""
        decision, answers = self._look(state)
        reason = {
            ALLOW: "the last step is not an answer to judge",
            STOP: "the answer needs no revision",
            REQUEST: f"answer {answers} needs a revision",
            FORBID: f"answer {answers} is not good enough after {self.revisions} revisions",
        }[decision]
        used_up = StopReason.RETRY_LIMIT if decision is FORBID else None
        facts = {"answers": answers, "revisions": self.revisions}
        return evaluation(self, decision, reason, facts, used_up)

    def _look(self, state: AgentState) -> tuple[ContinuationDecision, int]:
        last = state.current_step
        if state.step_count == 0 or last is None or last.type is not StepType.FINAL_RESPONSE:
            return ALLOW, 0
        answers = sum(1 for _ in _answers(state.messages))
        if not self.needs_revision(last.text or ""):
            return STOP, answers
        return (FORBID if answers > self.revisions else REQUEST), answers


def _answers(messages: tuple[Message, ...]) -> Iterator[Message]:
    """Yield the newest answers in a row: the texts of the model since its last tool call.

    User messages between them are requests to revise; a prompt begins a new row.
    """
    for message in reversed(messages):
        if message.is_tool() or message.tool_calls:
            return
        if message.is_prompt():
            return
        if message.is_assistant():
            yield message


class ToolCallPresenceCheck:
    """Requests the first step of an execution, and a further one while the model calls tools.

    A provider may pause a turn in which the model uses its tools: it goes on in the next step.
    """

    def decide(self, state: AgentState) -> ContinuationDecision:
        """Request when no step was made yet, or the last one called tools or was paused."""
        last = state.current_step
        if state.step_count == 0 or last is None or last.has_tool_calls or _is_paused(last):
            return REQUEST
        return STOP

    def explain(self, state: AgentState) -> ContinuationEvaluation:
        """Return the decision with its reason."""
        decision = self.decide(state)
        if state.step_count == 0:
            reason = "no step was made yet"
        elif state.current_step and _is_paused(state.current_step):
            reason = "the provider paused the model's turn; it goes on with the next step"
        elif decision is REQUEST:
            reason = "the last step called tools; the model has to see their results"
        else:
            reason = "the last step called no tools"
        return evaluation(self, decision, reason, {"steps": state.step_count})


class WorkAssumed:
    """Requests another step in place of the criteria that only the agent's code has.

    Where that code is not at hand, limits hold as if work were left.
    """

    def decide(self, _: AgentState) -> ContinuationDecision:
        """Request."""
        return REQUEST

    def explain(self, state: AgentState) -> ContinuationEvaluation:
        """Return the request with its reason."""
        reason = "the agent's code is not here; work may be left by its criteria"
        return evaluation(self, self.decide(state), reason, {})


def _is_paused(last: LastStep) -> bool:
    return last.finish_reason is FinishReason.PAUSE


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
        """Call the function."""
        return ContinuationDecision(self.function(state))

    def explain(self, state: AgentState) -> ContinuationEvaluation:
        """Return the decision with the function's name."""
        decision = self.decide(state)
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return evaluation(self, decision, f"{name} says {decision.value}", {"function": name})


def when(function: Callable[[AgentState], ContinuationDecision]) -> CallableCriterion:
    """Return a criterion whose decision is the function's; a forbid stops with reason `guard`."""
    return CallableCriterion(function)
