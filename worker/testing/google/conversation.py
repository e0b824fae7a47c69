"""Reads a request of `generateContent` as one of chat completions, as strictly as the service."""

import base64
import re
from collections.abc import Iterator
from typing import Any

import orjson

from stepfleet.worker.testing.scenario.latency import name_of
from stepfleet.worker.testing.wire import MisfitError

PATH = re.compile(
    r"/v1(?:beta)?/models/(?P<model>.+):(?P<verb>generateContent|streamGenerateContent)"
)
_FIELDS = {
    "contents", "systemInstruction", "tools", "toolConfig", "generationConfig", "serviceTier",
    "safetySettings", "cachedContent", "labels",
}  # fmt: skip
_MODES = {"AUTO": "auto", "ANY": "required", "NONE": "none"}
_SIGNED = b"signed-"
_FOREIGN = "skip_thought_signature_validator"


def conversation(body: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the request as one of chat completions. Raises `MisfitError`."""
    found = PATH.fullmatch(path)
    if found is None:
        raise MisfitError("path", "names no model")
    if unknown := sorted(body.keys() - _FIELDS):
        raise MisfitError(unknown[0], "Unknown name: Cannot find field")
    contents = body.get("contents")
    if not isinstance(contents, list) or not contents:
        raise MisfitError("contents", "contents is not specified")
    system = body.get("systemInstruction") or {}
    messages = [{"role": "system", "content": _text(system)}] if _text(system) else []
    for number, turn in enumerate(contents):
        messages += _messages(turn, f"contents[{number}]")
    chat: dict[str, Any] = {"model": found["model"], "messages": messages}
    declared = [one for tool in body.get("tools") or () for one in tool["functionDeclarations"]]
    if declared:
        chat["tools"] = [_tool(one) for one in declared]
        chat["tool_choice"] = _choice(body.get("toolConfig") or {})
    if found["verb"] == "streamGenerateContent":
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    return chat


def signature(place: str) -> str:
    """Return the signature that the server gives to what it thought before an answer's part."""
    return base64.b64encode(_SIGNED + name_of(place).encode()).decode()


def _is_ours(given: Any) -> bool:
    try:
        return base64.b64decode(str(given), validate=True).startswith(_SIGNED)
    except ValueError:
        return False


def _messages(turn: dict[str, Any], place: str) -> Iterator[dict[str, Any]]:
    role, parts = turn.get("role"), turn.get("parts") or []
    if role not in {"user", "model"}:
        raise MisfitError(f"{place}.role", "Please use a valid role: user, model")
    if not parts:
        raise MisfitError(f"{place}.parts", "must have at least one part")
    if role == "model":
        yield _assistant(parts, place)
        return
    for part in parts:
        if answer := part.get("functionResponse"):
            if not isinstance(answer.get("response"), dict):
                raise MisfitError(f"{place}.parts", "functionResponse.response must be an object")
            content = str(answer["response"].get("result", ""))
            yield {"role": "tool", "tool_call_id": answer.get("id"), "content": content}
    if rest := [part for part in parts if "functionResponse" not in part]:
        texts = all("text" in part for part in rest)
        yield {"role": "user", "content": _text({"parts": rest}) if texts else rest}


def _assistant(parts: list[dict[str, Any]], place: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _text({"parts": parts}) or None}
    made = [part for part in parts if "functionCall" in part]
    if made and "thoughtSignature" not in made[0] and "thoughtSignature" not in parts[0]:
        raise MisfitError(place, "Function call is missing a thought_signature")
    for part in parts:
        given = part.get("thoughtSignature")
        if given not in (None, _FOREIGN) and not _is_ours(given):
            raise MisfitError(place, "Thought signature is not valid")
    calls = [part["functionCall"] for part in made]
    if calls:
        message["tool_calls"] = [
            {
                "id": call.get("id"),
                "type": "function",
                "function": {
                    "name": call.get("name"),
                    "arguments": orjson.dumps(call.get("args") or {}).decode(),
                },
            }
            for call in calls
        ]
    return message


def _text(content: dict[str, Any]) -> str:
    return "".join(str(part["text"]) for part in content.get("parts") or () if "text" in part)


def _tool(declared: dict[str, Any]) -> dict[str, Any]:
    schema = declared.get("parametersJsonSchema", {})
    return {"type": "function", "function": {"name": declared.get("name"), "parameters": schema}}


def _choice(config: dict[str, Any]) -> Any:
    calling = config.get("functionCallingConfig") or {"mode": "AUTO"}
    if calling.get("mode") not in _MODES:
        raise MisfitError("toolConfig.functionCallingConfig.mode", "is no mode")
    named = calling.get("allowedFunctionNames")
    if named:
        return {"type": "function", "function": {"name": named[0]}}
    return _MODES[calling["mode"]]
