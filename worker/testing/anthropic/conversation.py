"""Reads a request of Messages as one of chat completions, as strictly as the service. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from stepfleet.orchestrator.records import exact_json
from stepfleet.worker.testing.scenario.latency import name_of
from stepfleet.worker.testing.scenario.shapes import Tagged
from stepfleet.worker.testing.wire import PLAIN_ID, MisfitError, fit, fit_id

_SOURCE = {"type": str, "data?": str, "url?": str, "media_type?": str}
_RESULT: dict[str, dict[str, Any]] = {
    "text": {"text": str},
    "image": {"source": _SOURCE},
    "document": {"source": _SOURCE, "title?": str},
    "search_result": {},
}
_BLOCK = Tagged({
    **_RESULT,
    "tool_use": {"id": str, "name": str, "input": dict},
    "tool_result": {"tool_use_id": str, "content?": (str, [Tagged(_RESULT)]), "is_error?": bool},
    "thinking": {"thinking": str, "signature": str},
    "redacted_thinking": {"data": str},
})  # fmt: skip
_SHAPE: dict[str, Any] = {
    "model": str,
    "max_tokens": int,
    "messages": [{"role": frozenset({"user", "assistant"}), "content": (str, [_BLOCK])}],
    "system?": (str, [Tagged({"text": {"text": str}})]),
    "tools?": [{"name": str, "input_schema": dict, "description?": str, "strict?": bool}],
    "tool_choice?": {
        "type": frozenset({"auto", "any", "none", "tool"}), "name?": str,
        "disable_parallel_tool_use?": bool,
    },
    "thinking?": {"type": frozenset({"enabled", "adaptive", "disabled"}), "budget_tokens?": int},
    "stream?": bool,
    "stop_sequences?": [str],
    "service_tier?": str,
    "top_k?": int,
    **dict.fromkeys(("temperature?", "top_p?"), float),
    **dict.fromkeys(("output_config?", "metadata?", "cache_control?"), dict),
}  # fmt: skip
_THOUGHTS = {"thinking", "redacted_thinking"}
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
    chat: dict[str, Any] = {"model": body["model"], "messages": messages}
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
        blocks += ({"role": turn["role"], **block} for block in _blocks(turn["content"]))
    blocks[fixed] = {**blocks[fixed], **{name: body.get(name) for name in _OF_MESSAGES}}
    if mark := body.get("cache_control"):
        blocks[-1] = {**blocks[-1], "cache_control": mark}
    return [
        (
            exact_json.dumps({name: one for name, one in block.items() if name != "cache_control"}),
            bool(block.get("cache_control")),
        )
        for block in blocks
    ]


def _check(body: dict[str, Any]) -> None:
    fit(body, _SHAPE, index=".{}", unknown="Extra inputs are not permitted")
    if body["max_tokens"] < 1:
        raise MisfitError("max_tokens", "Input should be greater than or equal to 1")
    if not body["messages"]:
        raise MisfitError("messages", "at least one message is required")
    thinking = body.get("thinking") or {}
    budget = thinking.get("budget_tokens") or 0
    if thinking.get("type") == "enabled" and not _LEAST_BUDGET <= budget < body["max_tokens"]:
        why = "must be at least 1024 and less than `max_tokens`"
        raise MisfitError("thinking.budget_tokens", why)
    _check_results(body["messages"])
    if thinking.get("type") == "enabled":
        _check_thought(body["messages"])


def _check_results(turns: list[dict[str, Any]]) -> None:
    """Check that all calls of a turn are answered in the next one, and nothing else is."""
    used: list[str] = []
    for number, turn in enumerate([*turns, {"role": "user", "content": []}]):
        blocks, place = _blocks(turn["content"]), f"messages.{number}"
        results = [one["tool_use_id"] for one in blocks if one["type"] == "tool_result"]
        if other := [one for one in results if one not in used]:
            raise MisfitError(place, f"unexpected `tool_use_id` found in `tool_result` blocks: "
                f"{other[0]}. Each `tool_result` block must have a corresponding `tool_use` block "
                "in the previous message.")  # fmt: skip
        if missing := [one for one in used if one not in results]:
            raise MisfitError(place, "`tool_use` ids were found without `tool_result` blocks "
                f"immediately after: {', '.join(missing)}.")  # fmt: skip
        used = [one["id"] for one in blocks if one["type"] == "tool_use"]


def _check_thought(turns: list[dict[str, Any]]) -> None:
    """Check that the answer whose calls have just been answered begins with thinking."""
    *_, question, answered = ({"content": ""}, *turns)
    kind = next((one["type"] for one in _blocks(question["content"])), "text")
    is_loop = any(one["type"] == "tool_result" for one in _blocks(answered["content"]))
    if is_loop and kind not in _THOUGHTS:
        raise MisfitError(
            f"messages.{len(turns) - 2}.content.0.type",
            f"Expected `thinking` or `redacted_thinking`, but found `{kind}`. When `thinking` is "
            "enabled, a final `assistant` message must start with a thinking block",
        )


def _messages(turn: dict[str, Any], place: str) -> Iterator[dict[str, Any]]:
    role, blocks = turn["role"], _blocks(turn["content"])
    if not blocks:
        raise MisfitError(f"{place}.content", "must not be empty")
    for number, block in enumerate(blocks):
        if block["type"] == "text" and not block["text"].strip():
            raise MisfitError(f"{place}.content.{number}", "text content blocks must be non-empty")
        if block["type"] == "tool_use" and role == "user":
            raise MisfitError(f"{place}.content.{number}", "`tool_use` blocks are of the assistant")
    if role == "assistant":
        yield _assistant(blocks, place)
        return
    results = [block for block in blocks if block["type"] == "tool_result"]
    if results and blocks[: len(results)] != results:
        raise MisfitError(place, "tool_result blocks come first in a user message")
    for block in results:
        text = _text(block.get("content") or "")
        yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": text}
    if rest := blocks[len(results) :]:
        texts = all(block["type"] == "text" for block in rest)
        yield {"role": "user", "content": _text(rest) if texts else rest}


def _assistant(blocks: list[dict[str, Any]], place: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _text(blocks) or None}
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        where = f"{place}.content.{number}"
        if block["type"] == "thinking" and block["signature"] != signature(block):
            raise MisfitError(where, "Invalid `signature` in `thinking` block")
        if block["type"] in _THOUGHTS and calls:
            why = (
                "`thinking` or `redacted_thinking` blocks cannot be modified or moved behind calls"
            )
            raise MisfitError(where, why)
        if block["type"] == "tool_use":
            fit_id(block["id"], PLAIN_ID, f"{where}.tool_use.id")
            arguments = exact_json.text(block["input"])
            function = {"name": block["name"], "arguments": arguments}
            calls.append({"id": block["id"], "type": "function", "function": function})
    if blocks[-1]["type"] in _THOUGHTS:
        raise MisfitError(place, "The final block in an assistant message cannot be `thinking`.")
    if calls:
        message["tool_calls"] = calls
    return message


def signature(block: dict[str, Any]) -> str:
    """Return the signature that the server gives a block of thinking."""
    return f"signed-{name_of(block['thinking'])}"


def _blocks(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _text(content: str | list[dict[str, Any]]) -> str:
    return "".join(one["text"] for one in _blocks(content) if one["type"] == "text")


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _choice(choice: dict[str, Any]) -> Any:
    if choice["type"] == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return _CHOICES[choice["type"]]
