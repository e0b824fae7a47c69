"""A run's trace as typed steps or as messages, derived from its facts. Stores nothing."""

import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.calls.tools import ToolCall, ToolCallRecord
from stepfleet.orchestrator.records.conversation.messages import (
    Message,
    Role,
    media_messages,
    result_text,
    value_text,
)
from stepfleet.orchestrator.records.run.facts import RunFacts, RunStatus
from stepfleet.orchestrator.records.steps import StepResult


class ToolTrace(Record):
    """One tool call: its step (from 1), its index in the response (from 0), and its record."""

    step: int
    index: int
    call: ToolCallRecord


class ToolTraces(Record):
    """The tool calls of committed steps, in their order."""

    traces: tuple[ToolTrace, ...] = ()

    def all(self) -> tuple[ToolTrace, ...]:
        """Return all of them."""
        return self.traces

    def last(self) -> ToolTrace | None:
        """Return the newest one, if there is one."""
        return self.traces[-1] if self.traces else None

    def by_name(self, name: str) -> tuple[ToolTrace, ...]:
        """Return the calls of the tool `name`."""
        return tuple(trace for trace in self.traces if trace.call.tool_name == name)

    def failed(self) -> tuple[ToolTrace, ...]:
        """Return the calls that ended in an error."""
        return tuple(trace for trace in self.traces if trace.call.is_error)


def tool_traces_of(steps: Iterable[StepResult], cleared: int = 0) -> ToolTraces:
    """Return the tool calls of `steps` without the first `cleared` ones."""
    found = [
        ToolTrace(step=step.step, index=index, call=call)
        for step in steps
        for index, call in enumerate(step.tool_calls)
    ]
    return ToolTraces(traces=tuple(found[cleared:]))


LINE_LENGTH = 120
"""Longest content, in characters, that a one-line description quotes."""


class Task(Record):
    """The task of the run."""

    type: Literal["task"] = "task"
    content: str

    def to_message(self) -> Message:
        """Return the task as a user message."""
        return Message.user(self.content)

    def describe(self) -> str:
        """Return one line."""
        return f"Task: {one_line(self.content)}"


class PlanningStep(Record):
    """Text of the model that is not its final answer: a plan, a thought with its calls."""

    type: Literal["planning"] = "planning"
    plan: str

    def to_message(self) -> Message:
        """Return the text as an assistant message."""
        return Message.assistant(self.plan)

    def describe(self) -> str:
        """Return one line."""
        return f"Planning: {one_line(self.plan)}"


class Action(Record):
    """A tool call of the model."""

    type: Literal["action"] = "action"
    tool_name: str
    tool_call_id: str
    arguments: dict[str, Any] = Field(default_factory=dict)

    def to_message(self) -> Message:
        """Return the assistant message that carries the call."""
        call = ToolCall(id=self.tool_call_id, name=self.tool_name, arguments=self.arguments)
        return Message.assistant("", (call,))

    def describe(self) -> str:
        """Return one line."""
        arguments = json.dumps(self.arguments, ensure_ascii=False)
        return f"Action: {one_line(f'{self.tool_name} {arguments}')}"


class Observation(Record):
    """The result of a tool call; `result` is the text that the model read."""

    type: Literal["observation"] = "observation"
    tool_call_id: str
    result: str
    is_error: bool = False

    def to_message(self) -> Message:
        """Return the tool message that answers the call."""
        return Message(role=Role.TOOL, content=self.result, tool_call_id=self.tool_call_id)

    def describe(self) -> str:
        """Return one line."""
        what = "Observation (error)" if self.is_error else "Observation"
        return f"{what}: {one_line(self.result)}"


class FinalAnswer(Record):
    """The run's answer; `structured` is its data where the agent has an answer schema."""

    type: Literal["final_answer"] = "final_answer"
    answer: str
    structured: Any = None

    def to_message(self) -> Message:
        """Return the text as an assistant message."""
        return Message.assistant(self.answer)

    def describe(self) -> str:
        """Return one line."""
        return f"FinalAnswer: {one_line(self.answer)}"


AgentStep = Annotated[
    Task | PlanningStep | Action | Observation | FinalAnswer,
    Field(discriminator="type"),
]


def one_line(text: Any) -> str:
    """Return a value's text on one line, shortened to `LINE_LENGTH` characters."""
    flat = " ".join(value_text(text).split())
    return flat if len(flat) <= LINE_LENGTH else flat[: LINE_LENGTH - 3] + "..."


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
