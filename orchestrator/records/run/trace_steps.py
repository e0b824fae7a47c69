"""A run seen as small typed steps: task, planning, action, observation, final answer.

These are views for replay and explanation, derived from what is stored; nothing stores them.
"""

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field

from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.calls.tools import ToolCall, ToolCallRecord
from stepfleet.orchestrator.records.conversation.messages import Message, Role
from stepfleet.orchestrator.records.conversation.tool_text import value_text
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
    """Text of the model that is not its final answer: a plan, a thought beside its calls."""

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
