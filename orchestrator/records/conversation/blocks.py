"""The block form of a conversation and the way back, without loss.

In block form every content is a list of blocks, a call is a `toolUse` block of its assistant
message, and all results of one step are `toolResult` blocks of one user message:

    {"role": "assistant", "content": [{"text": "..."}, {"toolUse": {"toolUseId", "name", "input"}}]}
    {"role": "user", "content": [{"toolResult": {"toolUseId", "content": [...], "status"?}}]}

Blocks of any other kind pass through as they are. Three optional keys carry what plain blocks
cannot say: `name`, `metadata`, and `literal`, the number of leading blocks that are a message's
content as they stand (needed where a list of blocks would read back as text or as a call).
Provider formats live in adapters, not here.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from stepfleet.orchestrator.records.calls.tools import ToolCall
from stepfleet.orchestrator.records.conversation.messages import Block, Content, Message, Role

BlockMessage = dict[str, Any]
CALL, RESULT = "toolUse", "toolResult"
_RESULT_KEYS = frozenset({"toolUseId", "content", "name", "metadata", "literal"})


def to_blocks(messages: Iterable[Message]) -> list[BlockMessage]:
    """Return the block form of a conversation; tool messages in a row become one user message.

    Raises `ValueError` on a message that no conversation has: calls that are not an assistant's,
    or a `tool_call_id` that is not a tool message's.
    """
    blocks: list[BlockMessage] = []
    names: dict[str | None, str] = {}
    answering = False
    for message in messages:
        _check(message)
        if message.is_tool():
            block = {RESULT: _result_block(message, names)}
            if answering:
                blocks[-1]["content"].append(block)
            else:
                blocks.append({"role": Role.USER.value, "content": [block]})
        else:
            blocks.append(_block_message(message))
            names |= {call.id: call.name for call in message.tool_calls}
        answering = message.is_tool()
    return blocks


def from_blocks(messages: Iterable[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Return the flat form: one tool message per `toolResult`, calls on their assistant message.

    Raises `ValueError` (pydantic's `ValidationError` among them) for anything but a block message.
    """
    found: list[Message] = []
    names: dict[str | None, str] = {}
    for message in messages:
        for flat in _flat_messages(message, names):
            found.append(flat)
            names |= {call.id: call.name for call in flat.tool_calls}
    return tuple(found)


def _check(message: Message) -> None:
    if message.tool_calls and not message.is_assistant():
        msg = f"field 'tool_calls': only an assistant message has calls, not a {message.role.value}"
        raise ValueError(msg)
    if message.tool_call_id is not None and not message.is_tool():
        msg = f"field 'tool_call_id': only a tool message has one, not a {message.role.value}"
        raise ValueError(msg)


def _block_message(message: Message) -> BlockMessage:
    content = _content_blocks(message.content)
    calls = [{CALL: _call_block(call)} for call in message.tool_calls]
    special = _special_block(message.role)
    block: BlockMessage = {"role": message.role.value, "content": [*content, *calls]}
    if message.name is not None:
        block["name"] = message.name
    if message.metadata:
        block["metadata"] = copy.deepcopy(message.metadata)
    if _needs_literal(message.content, special):
        block["literal"] = len(content)
    return block


def _call_block(call: ToolCall) -> dict[str, Any]:
    block = {"toolUseId": call.id, "name": call.name, "input": copy.deepcopy(call.arguments)}
    return block if call.error is None else {**block, "error": call.error}


def _result_block(message: Message, names: Mapping[str | None, str]) -> dict[str, Any]:
    metadata = copy.deepcopy(message.metadata)
    block: dict[str, Any] = {"content": _content_blocks(message.content)}
    if message.tool_call_id is not None:
        block["toolUseId"] = message.tool_call_id
    extra = metadata.get(RESULT)
    if isinstance(extra, dict) and extra and not _RESULT_KEYS & extra.keys():
        block |= metadata.pop(RESULT)
    if message.name != names.get(message.tool_call_id):
        block["name"] = message.name
    if metadata:
        block["metadata"] = metadata
    if _needs_literal(message.content, None):
        block["literal"] = len(block["content"])
    return block


def _flat_messages(
    message: Mapping[str, Any], names: Mapping[str | None, str]
) -> Iterator[Message]:
    unknown = sorted(message.keys() - {"role", "content", "name", "metadata", "literal"})
    if unknown:
        msg = f"field {unknown[0]!r} is not known in a message of blocks"
        raise ValueError(msg)
    role = Role(str(message.get("role", "")))
    blocks = _block_list(message.get("content", []))
    kept = _literal_count(message)
    literal, rest = blocks[:kept], blocks[kept:]
    special = _special_block(role)
    taken = [block for block in rest if special and special in block]
    others = [*literal, *(block for block in rest if not (special and special in block))]
    if special == RESULT:
        yield from (_tool_message(block[RESULT], names) for block in taken)
        if taken and not others:
            return
    yield Message(
        role=role,
        content=others if "literal" in message else _content(others),
        name=message.get("name"),
        tool_calls=tuple(_call(block[CALL]) for block in taken) if special == CALL else (),
        metadata=copy.deepcopy(message.get("metadata", {})),
    )


def _literal_count(message: Mapping[str, Any]) -> int:
    count = message.get("literal", 0)
    if not isinstance(count, int) or count < 0:
        raise ValueError("field 'literal' must be a number of blocks, 0 or more")
    return count


def _tool_message(block: Any, names: Mapping[str | None, str]) -> Message:
    if not isinstance(block, Mapping):
        raise ValueError("field 'toolResult' must be a mapping")  # noqa: TRY004 - as documented
    call_id = block.get("toolUseId")
    content = _block_list(block.get("content", []))
    extra = {key: block[key] for key in block if key not in _RESULT_KEYS}
    metadata = {**block.get("metadata", {}), **({RESULT: extra} if extra else {})}
    return Message(
        role=Role.TOOL,
        content=content if "literal" in block else _content(content),
        name=block.get("name", names.get(call_id)),
        tool_call_id=call_id,
        metadata=copy.deepcopy(metadata),
    )


def _call(block: Any) -> ToolCall:
    if not isinstance(block, Mapping):
        raise ValueError("field 'toolUse' must be a mapping")  # noqa: TRY004 - as documented
    unknown = sorted(block.keys() - {"toolUseId", "name", "input", "error"})
    if unknown:
        msg = f"field 'toolUse.{unknown[0]}' is not known"
        raise ValueError(msg)
    call = {
        "id": block.get("toolUseId"),
        "name": block.get("name"),
        "arguments": copy.deepcopy(block.get("input", {})),
        "error": block.get("error"),
    }
    return ToolCall.model_validate(call)


def _special_block(role: Role) -> str | None:
    """Return the kind of block that is taken out of a content list of this role."""
    return {Role.ASSISTANT: CALL, Role.USER: RESULT}.get(role)


def _needs_literal(content: Content, special: str | None) -> bool:
    if isinstance(content, str):
        return False
    taken = any(special in block for block in content) if special else False
    return taken or _content(content) != content


def _content_blocks(content: Content) -> list[Block]:
    if isinstance(content, str):
        return [{"text": content}] if content else []
    return copy.deepcopy(content)


def _content(blocks: Sequence[Block]) -> Content:
    """Return a list of blocks as content: none or one block of text is plain text."""
    if not blocks:
        return ""
    only = blocks[0] if len(blocks) == 1 else {}
    if only.keys() == {"text"} and isinstance(only["text"], str) and only["text"]:
        return str(only["text"])
    return list(blocks)


def _block_list(content: Any) -> list[Block]:
    if isinstance(content, str):
        return _content_blocks(content)
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        msg = "field 'content' must be a list of blocks, each a mapping, or a text"
        raise ValueError(msg)
    return copy.deepcopy(content)
