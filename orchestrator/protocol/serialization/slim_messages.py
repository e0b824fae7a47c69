"""One message in a snapshot: `{role, content, metadata}`, its calls and its place in `metadata`.

Both directions stand here, so that they use the same names.
"""

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stepfleet.orchestrator.protocol.serialization.slim_config import SlimSerializationConfig
from stepfleet.orchestrator.records.calls.tools import ToolCall, ToolCallRecord
from stepfleet.orchestrator.records.conversation.messages import Block, Content, Message

MARK = "..."
OMITTED_RESULT = "[tool result omitted]"


def newest_messages(messages: Sequence[Message], limit: int) -> tuple[Message, ...]:
    """Return at most `limit` messages: the instructions in front, then the newest ones.

    A result whose call is no longer there is left out too.
    """
    if limit <= 0:
        return ()
    if len(messages) <= limit:
        return tuple(messages)
    head = next((i for i, one in enumerate(messages) if not one.is_system()), len(messages))
    pinned = messages[: min(head, limit)]
    first = max(len(messages) - (limit - len(pinned)), head)
    while first < len(messages) and messages[first].is_tool():
        first += 1
    return (*pinned, *messages[first:])


def shortened(content: Content, limit: int) -> Content:
    """Return content whose texts have at most `limit` characters in all, cut ones marked."""
    if isinstance(content, str):
        return cut(content, limit)
    left, kept = limit, []
    for block in content:
        if not isinstance(block.get("text"), str):
            kept.append(_small(block, limit))
        elif left > 0:
            kept.append({**block, "text": cut(block["text"], left)})
            left -= len(block["text"])
    return kept


def cut(text: str, limit: int) -> str:
    """Return `text`, or its first `limit` characters and the mark."""
    return text if len(text) <= limit else text[: max(limit, 0)] + MARK


def shortened_arguments(value: Any, limit: int) -> Any:
    """Return a call's arguments with each text in them cut."""
    match value:
        case str():
            return cut(value, limit)
        case dict():
            return {name: shortened_arguments(one, limit) for name, one in value.items()}
        case list():
            return [shortened_arguments(one, limit) for one in value]
        case _:
            return value


def _small(block: Block, limit: int) -> Block:
    """Return a block of another kind, or a note that it was too large to keep."""
    if len(json.dumps(block, ensure_ascii=False, default=str)) <= limit:
        return dict(block)
    kind = next(iter(block), "content")
    return {"text": f"[{kind} omitted]"}


CALLS, CALL_ID, TOOL_NAME, NAME = "tool_calls", "tool_call_id", "tool_name", "name"
UNKNOWN = "unknown"


def slim_message(message: Message, config: SlimSerializationConfig) -> dict[str, Any]:
    """Return a message as a snapshot has it."""
    if message.is_tool() and not config.include_tool_results:
        content: Any = OMITTED_RESULT
    else:
        content = shortened(message.content, config.max_content_length)
    return {"role": message.role.value, "content": content, "metadata": _metadata(message, config)}


def whole_message(data: Mapping[str, Any]) -> Message:
    """Return the message that a snapshot has. Raises `pydantic.ValidationError`."""
    metadata = dict(data.get("metadata") or {})
    fields = {name: value for name, value in data.items() if name != "metadata"}
    if data.get("role") == "assistant" and isinstance(metadata.get(CALLS), list):
        fields[CALLS] = tuple(_whole_call(one) for one in metadata.pop(CALLS))
    if data.get("role") == "tool":
        fields[CALL_ID] = metadata.pop(CALL_ID, None)
        fields[NAME] = metadata.pop(TOOL_NAME, None)
    elif NAME in metadata:
        fields[NAME] = metadata.pop(NAME)
    return Message.model_validate({**fields, "metadata": metadata})


def slim_calls(calls: Iterable[ToolCallRecord]) -> list[dict[str, str]]:
    """Return the calls of a step by id and name."""
    return [{"id": call.call_id, "name": call.tool_name} for call in calls]


def _metadata(message: Message, config: SlimSerializationConfig) -> dict[str, Any]:
    metadata = copy.deepcopy(message.metadata)
    if message.tool_calls:
        metadata[CALLS] = [_call(call, config.max_content_length) for call in message.tool_calls]
    if config.redact_tool_args and isinstance(metadata.get(CALLS), list):
        metadata[CALLS] = [_redacted(call) for call in metadata[CALLS]]
    if message.is_tool():
        metadata[CALL_ID] = message.tool_call_id
        metadata[TOOL_NAME] = message.name
    elif message.name is not None:
        metadata[NAME] = message.name
    return metadata


def _call(call: ToolCall, limit: int) -> dict[str, Any]:
    entry = {
        "id": call.id,
        "name": call.name,
        "arguments": shortened_arguments(copy.deepcopy(call.arguments), limit),
    }
    return entry if call.error is None else {**entry, "error": call.error}


def _redacted(call: Any) -> dict[str, Any]:
    """Return only id and name of a call, also of one in a provider's form."""
    entry = call if isinstance(call, Mapping) else {}
    function = entry.get("function")
    inner = function.get("name") if isinstance(function, Mapping) else None
    return {"id": entry.get("id"), "name": entry.get("name") or inner or UNKNOWN}


def _whole_call(entry: Any) -> Any:
    """Return the readable form of a call: ours, or a provider's by its id and name."""
    if not isinstance(entry, Mapping) or "function" not in entry:
        return entry
    return {"id": entry.get("id"), "name": _redacted(entry)["name"]}
