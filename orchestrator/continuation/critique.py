"""The work driver of self-critique: requests revisions of answers that are not good enough.

Decides when an answer is revised and when that ends; the user supplies the judgement.
"""

from collections.abc import Callable, Iterator

from stepfleet.orchestrator.continuation.protocols import ALLOW, FORBID, REQUEST, STOP, evaluation
from stepfleet.orchestrator.records.messages import Message
from stepfleet.orchestrator.records.outcome import (
    ContinuationDecision,
    ContinuationEvaluation,
    StopReason,
)
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.steps import StepType


class SelfCritique:
    """Requests another answer while `needs_revision` is true for the newest one's text.

    After `revisions` of them it forbids, with stop reason `retry_limit`. Steps that called tools,
    planned or failed are no answers, and are allowed.
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
            ALLOW: "the last step is no answer to judge",
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
