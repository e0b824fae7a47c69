"""The conversation: one immutable message. Provider formats live in adapters, not here."""

import json
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from pydantic import Field

from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.calls.tools import ToolCall, ToolCallRecord
from stepfleet.orchestrator.records.errors import ErrorInfo


class Role(StrEnum):
    """The author of a message."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


ADDED = "added_by"
"""Metadata of a user message that no user wrote: a reminder, a note, a request to go on."""

REASONING = "reasoning"
"""The kind of a block that goes back to its provider as it came: signed or encrypted reasoning.

`{"reasoning": {"provider", "at", "data"}}`; `at` is its place: the number of texts and calls of the
answer before it. Other providers do not get it.
"""

Block = dict[str, Any]
Content = str | list[Block]


class Message(Record):
    """One message. `content` is text or a list of content blocks (see the module `blocks`).

    An assistant message carries its `tool_calls`; a tool message answers one of them by
    `tool_call_id` and has the tool's name in `name`. `metadata` is stored, never sent.
    """

    role: Role
    content: Content = ""
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    metadata: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def system(cls, text: str) -> "Message":
        """Return a system message."""
        return cls(role=Role.SYSTEM, content=text)

    @classmethod
    def user(cls, content: Content) -> "Message":
        """Return a user message."""
        return cls(role=Role.USER, content=content)

    @classmethod
    def added(cls, content: Content, by: str) -> "Message":
        """Return a user message that `by`, a part of the fleet, adds; it is never the prompt."""
        return cls(role=Role.USER, content=content, metadata={ADDED: by})

    @classmethod
    def assistant(cls, text: Content, tool_calls: tuple[ToolCall, ...] = ()) -> "Message":
        """Return an assistant message with its tool calls; `text` may be a list of blocks."""
        return cls(role=Role.ASSISTANT, content=text, tool_calls=tool_calls)

    @classmethod
    def tool(cls, call: ToolCall, text: str) -> "Message":
        """Return the tool message that answers `call`."""
        return cls(role=Role.TOOL, content=text, name=call.name, tool_call_id=call.id)

    @property
    def text(self) -> str:
        """The message's text; the text blocks joined when the content is a list of blocks."""
        if isinstance(self.content, str):
            return self.content
        return "".join(str(block["text"]) for block in self.content if "text" in block)

    @property
    def reasoning(self) -> tuple[Block, ...]:
        """The blocks of reasoning in the content."""
        content = self.content
        if isinstance(content, str):
            return ()
        return tuple(block for block in content if REASONING in block)

    def has_role(self, *roles: Role | str) -> bool:
        """Return whether the message's role is any of `roles`."""
        return self.role in roles

    def is_user(self) -> bool:
        """Return whether this is a user message."""
        return self.role is Role.USER

    def is_prompt(self) -> bool:
        """Return whether this is a user message that no part of the fleet added."""
        return self.role is Role.USER and ADDED not in self.metadata

    def is_assistant(self) -> bool:
        """Return whether this is a message of the model."""
        return self.role is Role.ASSISTANT

    def is_tool(self) -> bool:
        """Return whether this is a tool's answer."""
        return self.role is Role.TOOL

    def is_developer(self) -> bool:
        """Return whether this is a developer message."""
        return self.role is Role.DEVELOPER

    def is_system(self) -> bool:
        """Return whether this is a system or developer message."""
        return self.role in (Role.SYSTEM, Role.DEVELOPER)


ERROR_PREFIX = "Error: "
TOOLS = "tools"
"""Author of the message with the media of results (`records.conversation.messages.ADDED`)."""
SHOWN_FOR = "shown_for"
"""Its metadata: for each of its blocks the call that it belongs to; the first is a caption."""
_as_json = json.JSONEncoder(ensure_ascii=False).encode


def result_text(record: ToolCallRecord) -> str:
    """Return the text of the tool message that answers the call.

    Text is given as it is, everything else as JSON; an error is `Error: ` and the JSON of
    `{"error": {"code", "message", "retryable"}}`.
    """
    if record.error is not None:
        return ERROR_PREFIX + value_text(error_data(record.error))
    return value_text(record.result)


def media_messages(records: Iterable[ToolCallRecord]) -> tuple[Message, ...]:
    """Return the message with the images of a step's results; nothing where there are none.

    It is a user message, since not every provider accepts images in tool messages.
    """
    blocks: list[Block] = []
    calls: list[str] = []
    for record in records:
        if record.media:
            caption = f"Shown by tool {record.tool_name} (call {record.call_id}):"
            blocks += [{"text": caption}, *record.media]
            calls += [record.call_id] * (1 + len(record.media))
    metadata = {ADDED: TOOLS, SHOWN_FOR: calls}
    return (Message(role=Role.USER, content=blocks, metadata=metadata),) if blocks else ()


def value_text(value: Any) -> str:
    """Return JSON data as text: a string as it is, everything else as JSON."""
    return value if isinstance(value, str) else _as_json(value)


def error_data(error: ErrorInfo) -> dict[str, Any]:
    """Return a failure as data for the model."""
    return {"error": {"code": error.code, "message": error.message, "retryable": error.retryable}}
