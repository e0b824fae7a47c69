"""Reads a request of Messages as one of chat completions, as strictly as the service. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from stepfleet.worker.testing.wire import MisfitError

_FIELDS = {
    "model", "messages", "max_tokens", "system", "tools", "tool_choice", "stream", "temperature",
    "top_p", "top_k", "stop_sequences", "service_tier", "thinking", "output_config", "metadata",
    "cache_control",
}  # fmt: skip
_MOST_MARKS = 4
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_LEAST_BUDGET = 1024
_OF_MESSAGES = ("tool_choice", "thinking")


def conversation(body: dict[str, Any], _path: str) -> dict[str, Any]:
    """Return the request as one of chat completions. Raises `MisfitError`."""
    _check(body)
    messages = [{"role": "system", "content": _text(body["system"])}] if body.get("system") else []
    for number, turn in enumerate(body["messages"]):
        messages += _messages(turn, f"messages.{number}")
    if (marks := sum(mark for _, mark in marked_blocks(body))) > _MOST_MARKS:
        why = f"A maximum of 4 blocks with cache_control may be provided. Found {marks}."
        raise MisfitError("cache_control", why)
    chat: dict[str, Any] = {"model": body.get("model"), "messages": messages}
    if body.get("tools"):
        chat["tools"] = [_tool(tool) for tool in body["tools"]]
        chat["tool_choice"] = _choice(body.get("tool_choice") or {"type": "auto"})
    if body.get("stream"):
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    return chat


def marked_blocks(body: Mapping[str, Any]) -> list[tuple[bytes, bool]]:
    """Return the blocks of a prompt in order, each with whether it is marked for the cache.

    A mark of the whole request is one of its last block. How the model chooses tools and thinks
    belongs to the messages: they are not found again after a change of it.
    """
    blocks = [*(body.get("tools") or []), *_blocks(body.get("system") or "")]
    fixed = len(blocks)
    for turn in body["messages"]:
        blocks += ({"role": turn["role"], **block} for block in _blocks(turn.get("content")))
    blocks[fixed] = {**blocks[fixed], **{name: body.get(name) for name in _OF_MESSAGES}}
    if mark := body.get("cache_control"):
        blocks[-1] = {**blocks[-1], "cache_control": mark}
    return [
        (
            orjson.dumps({name: one for name, one in block.items() if name != "cache_control"}),
            bool(block.get("cache_control")),
        )
        for block in blocks
    ]


def _check(body: dict[str, Any]) -> None:
    if unknown := sorted(body.keys() - _FIELDS):
        raise MisfitError(unknown[0], "Extra inputs are not permitted")
    if not isinstance(body.get("max_tokens"), int) or body["max_tokens"] < 1:
        raise MisfitError("max_tokens", "Field required")
    thinking = body.get("thinking") or {}
    budget = thinking.get("budget_tokens", _LEAST_BUDGET)
    if thinking.get("type") == "enabled" and not _LEAST_BUDGET <= budget < body["max_tokens"]:
        raise MisfitError(
            "thinking.budget_tokens", "must be at least 1024 and less than `max_tokens`"
        )
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        raise MisfitError("messages", "at least one message is required")


def _messages(turn: dict[str, Any], place: str) -> Iterator[dict[str, Any]]:
    role, blocks = turn.get("role"), _blocks(turn.get("content"))
    if role not in {"user", "assistant"}:
        raise MisfitError(f"{place}.role", "must be user or assistant")
    if not blocks:
        raise MisfitError(f"{place}.content", "must not be empty")
    for number, block in enumerate(blocks):
        if block.get("type") == "text" and not str(block.get("text", "")).strip():
            raise MisfitError(f"{place}.content.{number}", "text content blocks must be non-empty")
    if role == "assistant":
        yield _assistant(blocks, place)
        return
    results = [block for block in blocks if block.get("type") == "tool_result"]
    if results and blocks[: len(results)] != results:
        raise MisfitError(place, "tool_result blocks come first in a user message")
    for block in results:
        yield {
            "role": "tool",
            "tool_call_id": block.get("tool_use_id"),
            "content": _text(block.get("content") or ""),
        }
    if rest := blocks[len(results) :]:
        texts = all(block.get("type") == "text" for block in rest)
        yield {"role": "user", "content": _text(rest) if texts else rest}


def _assistant(blocks: list[dict[str, Any]], place: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _text(blocks) or None}
    calls = []
    for number, block in enumerate(blocks):
        if block.get("type") == "thinking" and block.get("signature") != signature(block):
            raise MisfitError(f"{place}.content.{number}", "Invalid `signature`")
        if block.get("type") == "tool_use":
            arguments = orjson.dumps(block.get("input")).decode()
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
    if calls:
        message["tool_calls"] = calls
    return message


def signature(block: dict[str, Any]) -> str:
    """Return the signature that the server gives a block of thinking."""
    return f"signed-{len(str(block.get('thinking')))}-{str(block.get('thinking'))[:8]}"


def _blocks(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [one for one in content if isinstance(one, dict)] if isinstance(content, list) else []


def _text(content: str | Sequence[Any]) -> str:
    texts = (one.get("text", "") for one in _blocks(content) if one.get("type") == "text")
    return "".join(map(str, texts))


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(tool.get("input_schema"), dict):
        raise MisfitError("tools.input_schema", "Field required")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _choice(choice: dict[str, Any]) -> Any:
    if choice.get("type") == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") not in _CHOICES:
        raise MisfitError("tool_choice.type", "must be auto, any, none or tool")
    return _CHOICES[choice["type"]]
