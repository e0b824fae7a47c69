"""A run's trace as typed steps or as messages, derived from its facts. Stores nothing."""

from collections.abc import Iterable, Iterator

from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.calls.tools import ToolCall, ToolCallRecord
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.conversation.tool_text import media_messages, result_text
from stepfleet.orchestrator.records.run.facts import RunFacts, RunStatus
from stepfleet.orchestrator.records.run.trace_steps import (
    Action,
    AgentStep,
    FinalAnswer,
    Observation,
    PlanningStep,
    Task,
)
from stepfleet.orchestrator.records.steps import StepResult

ANSWER_TOOLS = frozenset({"final_answer", "structured_response"})
"""Calls that are the answer itself when they end a completed run."""
MALFORMED = "INVALID_FUNCTION_CALL"
"""Code of a call that could not be parsed: its error belongs to the call."""


class AgentTrace(Record):
    """The steps of a run, in order."""

    steps: tuple[AgentStep, ...] = ()
    is_success: bool = False

    @property
    def action_count(self) -> int:
        """How many tool calls the model made."""
        return sum(isinstance(step, Action) for step in self.steps)

    @property
    def observation_count(self) -> int:
        """How many tool calls were answered, errors included."""
        return sum(isinstance(step, Observation) for step in self.steps)

    def errors(self) -> tuple[Observation, ...]:
        """Return the observations that were errors."""
        return tuple(step for step in self.steps if isinstance(step, Observation) and step.is_error)


def trace_of(facts: RunFacts, task: str | None = None) -> AgentTrace:
    """Return the trace of a run; `task` is its input, which a result does not hold."""
    start: tuple[AgentStep, ...] = () if task is None else (Task(content=task),)
    done = (part for step in facts.steps for part in parts_of(facts, step))
    return AgentTrace(steps=(*start, *done), is_success=facts.success)


def parts_of(facts: RunFacts, step: StepResult) -> Iterator[AgentStep]:
    """Yield the parts of one committed step."""
    ends = facts.status is RunStatus.COMPLETED and step is facts.steps[-1]
    answers = [call for call in step.tool_calls if call.tool_name in ANSWER_TOOLS] if ends else []
    text_answers = ends and not step.tool_calls
    if step.thought and not text_answers:
        yield PlanningStep(plan=step.thought)
    acted = [call for call in step.tool_calls if call.is_error or call not in answers]
    for call in acted:
        yield Action(tool_name=call.tool_name, tool_call_id=call.call_id, arguments=call.arguments)
    for call in acted:
        yield Observation(
            tool_call_id=call.call_id, result=result_text(call), is_error=call.is_error
        )
    if ends:
        answer = facts.output or step.thought or ""
        yield FinalAnswer(answer=answer, structured=facts.structured)


def added_messages(steps: Iterable[StepResult]) -> tuple[Message, ...]:
    """Return the messages that steps added: each response, followed by its tools' results.

    A model call that failed has added none.
    """
    return tuple(message for step in steps for message in _messages_of(step))


def _messages_of(step: StepResult) -> Iterator[Message]:
    if step.errors and not step.tool_calls and step.usage is None:
        return
    calls = tuple(_call(record) for record in step.tool_calls)
    yield Message.assistant(step.thought or "", calls)
    for call, record in zip(calls, step.tool_calls, strict=True):
        yield Message.tool(call, result_text(record))
    yield from media_messages(step.tool_calls)


def _call(record: ToolCallRecord) -> ToolCall:
    malformed = record.error is not None and record.error.code == MALFORMED
    return ToolCall(
        id=record.call_id,
        name=record.tool_name,
        arguments=record.arguments,
        error=record.error.message if malformed and record.error else None,
    )
