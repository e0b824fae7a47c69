"""What a chat window shows: one message with its metadata, and which texts are shown. Pure."""

from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from typing import Any

from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.usage import UsageStats


class UIRole(StrEnum):
    """The sender; `status` is the fleet itself, and never part of a history."""

    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"
    STATUS = "status"


class StatusType(StrEnum):
    """The kind of a status. `error` stays in view; the others go when the run has ended."""

    THINKING = "thinking"
    TOOL_CALL = "tool_call"
    TOOL_RESULT = "tool_result"
    ERROR = "error"
    INFO = "info"
    CONTINUATION = "continuation"


class UIToolCall(Record):
    """A tool call as its indicator names it; live events have `args` or their summary."""

    id: str | None = None
    name: str
    args: dict[str, Any] | None = None
    args_summary: str | None = None


class UIContinuation(Record):
    """The decision after a step; `stop_reason` is set where the run stops."""

    should_continue: bool
    stop_reason: str | None = None
    resolved_by: str | None = None


class UIRetry(Record):
    """A step's repeated model call: the coming attempt, from 2.

    `of` is the most that there are. It is None where attempts are not counted: rate limits (429)
    cost time and no attempt. `retry_in_seconds` counts from the message's timestamp.
    """

    attempt: int
    of: int | None = None
    retry_in_seconds: float = 0.0


class UIMetadata(Record):
    """A message's metadata. Times are milliseconds.

    The messages of one step share `step` (from 1) and `group`. Only the first of them has the
    step's duration and the tokens of its model call, so that sums count nothing twice.
    `collapsed` messages show their details on request.
    """

    tool_calls: tuple[UIToolCall, ...] = ()
    tool_call_id: str | None = None
    tool_name: str | None = None
    tool_result: Any = None
    tool_error: str | None = None
    tool_duration_ms: float | None = None
    status_type: StatusType | None = None
    continuation: UIContinuation | None = None
    step: int | None = None
    step_duration_ms: float | None = None
    usage: UsageStats | None = None
    group: str | None = None
    collapsed: bool = False
    retry: UIRetry | None = None


class UIMessage(Record):
    """One message of a chat window. `id` is the same live and in the history; time is UTC."""

    id: str
    role: UIRole
    content: str
    timestamp: datetime
    metadata: UIMetadata | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the message as plain JSON-ready data; metadata that are not set are left out."""
        data = self.model_dump(mode="json")
        if self.metadata is None:
            del data["metadata"]
        else:
            data["metadata"] = self.metadata.model_dump(mode="json", exclude_defaults=True)
        return data

    @property
    def is_status(self) -> bool:
        """Whether it is the fleet's own, and no part of the history."""
        return self.role is UIRole.STATUS

    @property
    def is_error(self) -> bool:
        """Whether it is a status that stays in view when the run has ended."""
        return self.metadata is not None and self.metadata.status_type is StatusType.ERROR

    @property
    def tool_call_id(self) -> str | None:
        """The tool call that it shows, if it shows one."""
        return self.metadata.tool_call_id if self.metadata else None

    @property
    def group(self) -> str | None:
        """The group of its step, if it is of a step."""
        return self.metadata.group if self.metadata else None

    def with_metadata(self, **fields: Any) -> "UIMessage":
        """Return a copy with some of its metadata changed."""
        known = self.metadata or UIMetadata()
        return self.model_copy(update={"metadata": known.model_copy(update=fields)})


def step_id(run_id: str, step: int) -> str:
    """Return the id of the model's text in a step; those of its other messages begin with it."""
    return f"{run_id}:step:{step}"


def tool_id(run_id: str, step: int, call_id: str) -> str:
    """Return the id of a tool call's message."""
    return f"{step_id(run_id, step)}:tool:{call_id}"


def answer_id(run_id: str, step: int) -> str:
    """Return the id of an answer that the model gave by a tool call."""
    return f"{step_id(run_id, step)}:answer"


def group_of(step: int) -> str:
    """Return the name of the group that a step's messages form."""
    return f"step-{step}"


def of_step(step: int) -> dict[str, Any]:
    """Return the metadata that the messages of a step share."""
    return {"step": step, "group": group_of(step)}


def should_render_assistant_content(content: str, *, has_tool_calls: bool) -> bool:
    """Return whether a model's text is shown.

    Without tool calls it always is; with them only natural language: not empty, and not the
    beginning of JSON.
    """
    trimmed = content.strip()
    return not has_tool_calls or (bool(trimmed) and not trimmed.startswith(("{", "[")))


def indicator(calls: Iterable[UIToolCall]) -> str:
    """Return calls on one line, as `search(query: "lamps"), stock(product: "lamp")`."""
    return ", ".join(f"{call.name}({call.args_summary or ''})" for call in calls)
