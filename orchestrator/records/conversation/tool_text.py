"""The text of a tool's outcome for the model. Pure."""

import json
from collections.abc import Iterable
from typing import Any

from stepfleet.orchestrator.records.calls.tools import ToolCallRecord
from stepfleet.orchestrator.records.conversation.messages import ADDED, Block, Message, Role
from stepfleet.orchestrator.records.errors import ErrorInfo

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
