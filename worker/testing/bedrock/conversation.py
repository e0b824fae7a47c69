"""Reads a request of Converse as one of chat completions, as strictly as the service. Pure."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from stepfleet.worker.testing.wire import MisfitError

PATH = re.compile(r"/model/(?P<model>.+)/(?P<verb>converse|converse-stream)")
_FIELDS = {
    "messages", "system", "inferenceConfig", "toolConfig", "guardrailConfig", "outputConfig",
    "additionalModelRequestFields", "additionalModelResponseFieldPaths", "promptVariables",
    "requestMetadata", "performanceConfig", "serviceTier",
}  # fmt: skip
_KINDS = {
    "text", "image", "document", "video", "audio", "toolUse", "toolResult", "guardContent",
    "cachePoint", "reasoningContent", "citationsContent", "searchResult",
}  # fmt: skip
_MOST_MARKS = 4
_DOCUMENTS_NAME = re.compile(r"[A-Za-z0-9()\[\]-]+(?: [A-Za-z0-9()\[\]-]+)*")


def conversation(body: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the request as one of chat completions. Raises `MisfitError`."""
    found = PATH.fullmatch(path)
    if found is None:
        raise MisfitError("path", "names no model")
    _check(body)
    system = _text(body.get("system") or [])
    messages = [{"role": "system", "content": system}] if system else []
    names: set[str] = set()
    for number, turn in enumerate(body["messages"]):
        if number % 2 != (turn.get("role") == "assistant"):
            raise MisfitError(f"messages.{number}.role", "roles must alternate, user first")
        messages += _messages(turn, f"messages.{number}", names)
    chat: dict[str, Any] = {"model": found["model"], "messages": messages}
    if config := body.get("toolConfig"):
        specs = [tool["toolSpec"] for tool in config["tools"] if "toolSpec" in tool]
        chat["tools"] = [_tool(spec) for spec in specs]
        chat["tool_choice"] = _choice(config.get("toolChoice") or {"auto": {}})
    elif any("tool_calls" in message for message in messages):
        raise MisfitError(
            "toolConfig", "must be defined when using toolUse and toolResult content blocks"
        )
    if found["verb"] == "converse-stream":
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    return chat


def marked_blocks(body: Mapping[str, Any]) -> list[tuple[bytes, bool]]:
    """Return the blocks of a prompt in order, each with whether a cache point follows it."""
    blocks = [*(body.get("toolConfig") or {}).get("tools", ()), *(body.get("system") or ())]
    for turn in body.get("messages", []):
        blocks += ({"role": turn["role"], **block} for block in turn.get("content") or ())
    found: list[tuple[bytes, bool]] = []
    for block in blocks:
        if "cachePoint" not in block:
            found.append((orjson.dumps(block), False))
        elif found:
            found[-1] = (found[-1][0], True)
    return found


def signature(text: str) -> str:
    """Return the signature that the server gives reasoning."""
    return f"signed-{len(text)}-{text[:8]}"


def _check(body: dict[str, Any]) -> None:
    if unknown := sorted(body.keys() - _FIELDS):
        raise MisfitError(unknown[0], "extraneous key is not permitted")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise MisfitError("messages", "A conversation must start with a user message")
    for number, turn in enumerate(messages):
        if not isinstance(turn, dict) or not isinstance(turn.get("content"), list):
            raise MisfitError(f"messages.{number}.content", "must be a list of blocks")
    if sum(marked for _, marked in marked_blocks(body)) > _MOST_MARKS:
        raise MisfitError("cachePoint", "at most 4 are allowed")


def _messages(turn: dict[str, Any], place: str, names: set[str]) -> Iterator[dict[str, Any]]:
    blocks = [block for block in turn["content"] if "cachePoint" not in block]
    if not blocks:
        raise MisfitError(f"{place}.content", "must not be empty")
    for number, block in enumerate(blocks):
        _check_block(block, f"{place}.content.{number}", names)
    if any("document" in one for one in blocks) and not any("text" in one for one in blocks):
        raise MisfitError(place, "a document needs a text beside it")
    if turn["role"] == "assistant":
        yield _assistant(blocks, place)
        return
    results = [block for block in blocks if "toolResult" in block]
    if results and blocks[: len(results)] != results:
        raise MisfitError(place, "toolResult blocks come first in a user message")
    for block in results:
        given = block["toolResult"]
        yield {
            "role": "tool",
            "tool_call_id": given.get("toolUseId"),
            "content": _text(given["content"]),
        }
    if rest := blocks[len(results) :]:
        texts = all("text" in block for block in rest)
        yield {"role": "user", "content": _text(rest) if texts else rest}


def _check_block(block: dict[str, Any], place: str, names: set[str]) -> None:
    if not isinstance(block, dict) or len(block) != 1 or not block.keys() <= _KINDS | {"json"}:
        raise MisfitError(place, "must have exactly one known kind")
    if "text" in block and not str(block["text"]).strip():
        raise MisfitError(place, "The text field in the ContentBlock object is blank")
    if "toolResult" in block:
        content = block["toolResult"].get("content")
        if not isinstance(content, list):
            raise MisfitError(f"{place}.toolResult.content", "must be a list of blocks")
        for number, one in enumerate(content):
            _check_block(one, f"{place}.toolResult.content.{number}", names)
    if "document" in block:
        name = str(block["document"].get("name"))
        if not _DOCUMENTS_NAME.fullmatch(name) or len(name) > 200:  # noqa: PLR2004 - the service's
            raise MisfitError(
                f"{place}.document.name",
                "can only contain alphanumeric characters, single whitespace characters, hyphens, "
                "parentheses, and square brackets",
            )
        if name in names:
            raise MisfitError(f"{place}.document.name", "Duplicate document names")
        names.add(name)


def _assistant(blocks: list[dict[str, Any]], place: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _text(blocks) or None}
    calls = []
    for number, block in enumerate(blocks):
        thought = block.get("reasoningContent", {}).get("reasoningText")
        if thought and thought.get("signature") != signature(str(thought.get("text"))):
            raise MisfitError(f"{place}.content.{number}", "Invalid `signature` in reasoning")
        if used := block.get("toolUse"):
            arguments = orjson.dumps(used.get("input")).decode()
            function = {"name": used.get("name"), "arguments": arguments}
            calls.append({"id": used.get("toolUseId"), "type": "function", "function": function})
    if calls:
        message["tool_calls"] = calls
    return message


def _text(blocks: list[dict[str, Any]]) -> str:
    texts = (
        str(one["text"]) if "text" in one else orjson.dumps(one["json"]).decode()
        for one in blocks
        if "text" in one or "json" in one
    )
    return "".join(texts)


def _tool(spec: dict[str, Any]) -> dict[str, Any]:
    schema = (spec.get("inputSchema") or {}).get("json")
    if not isinstance(schema, dict) or spec.get("description") == "":
        raise MisfitError("toolConfig.tools", "inputSchema.json is required, description not empty")
    function = {"name": spec.get("name"), "parameters": schema}
    return {"type": "function", "function": function}


def _choice(choice: dict[str, Any]) -> Any:
    if "tool" in choice:
        return {"type": "function", "function": {"name": choice["tool"].get("name")}}
    if choice.keys() not in ({"auto"}, {"any"}):
        raise MisfitError("toolConfig.toolChoice", "must be auto, any or tool")
    return "required" if "any" in choice else "auto"
