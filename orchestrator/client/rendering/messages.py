"""What a chat window shows: one message and what is known of it. Pure values."""

from datetime import datetime
from enum import StrEnum
from typing import Any

from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.usage import UsageStats


class UIRole(StrEnum):
    """Who a message is from; `status` is from the fleet itself, and never part of a history."""

    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"
    STATUS = "status"


class StatusType(StrEnum):
    """What a status tells. `error` stays in view; the others go when the run has ended."""

    THINKING = "thinking"
    TOOL_CALL = "tool_call"
    TOOL_RESULT = "tool_result"
    ERROR = "error"
    INFO = "info"
    CONTINUATION = "continuation"


class UIToolCall(Record):
    """A tool call as its indicator names it; live events tell `args` or their summary."""

    id: str | None = None
    name: str
    args: dict[str, Any] | None = None
    args_summary: str | None = None


class UIContinuation(Record):
    """The decision behind a step; `stop_reason` is set where the run stops."""

    should_continue: bool
    stop_reason: str | None = None
    resolved_by: str | None = None


class UIRetry(Record):
    """A step's model call that is made again: the attempt to come, from 2.

    `of` is how many there are at most. It is None where that does not say when it ends: refusals
    for the moment (429) cost time and no attempt. `retry_in_seconds` counts from the message's
    timestamp.
    """

    attempt: int
    of: int | None = None
    retry_in_seconds: float = 0.0


class UIMetadata(Record):
    """What is known of a message beyond its text. Times are milliseconds.

    The messages of one step share `step` (from 1) and `group`. Its duration and the tokens of its
    model call stand on the first of them alone, so that sums count nothing twice. What is
    `collapsed` shows its details only when asked.
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
        """Whether it is the fleet's own word, and no part of the history."""
        return self.role is UIRole.STATUS

    @property
    def is_error(self) -> bool:
        """Whether it is a status that stays in view when the run has ended."""
        return self.metadata is not None and self.metadata.status_type is StatusType.ERROR

    @property
    def tool_call_id(self) -> str | None:
        """The tool call that it shows, if it shows one."""
        return self.metadata.tool_call_id if self.metadata else None

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
