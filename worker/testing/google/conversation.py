"""Reads a request of `generateContent` as one of chat completions, as strictly as the service."""

import base64
import re
from collections.abc import Iterator
from typing import Any

from stepfleet.orchestrator.records import exact_json
from stepfleet.worker.testing.scenario.latency import name_of
from stepfleet.worker.testing.wire import MisfitError, fit

PATH = re.compile(
    r"/v1(?:beta)?/models/(?P<model>.+):(?P<verb>generateContent|streamGenerateContent)"
)
_PART = {
    "text?": str,
    "thought?": bool,
    "thoughtSignature?": str,
    "inlineData?": {"mimeType": str, "data": str},
    "fileData?": {"fileUri": str, "mimeType?": str},
    "functionCall?": {"name": str, "args?": dict, "id?": str},
    "functionResponse?": {"name": str, "response": dict, "id?": str, "parts?": [dict]},
}
_FUNCTION = {"name": str, "description?": str, "parametersJsonSchema?": dict, "parameters?": dict}
_THINKING = {"thinkingBudget?": int, "thinkingLevel?": str, "includeThoughts?": bool}
_GENERATION = {
    **dict.fromkeys(("temperature?", "topP?"), float),
    **dict.fromkeys(("maxOutputTokens?", "seed?", "topK?"), int),
    "stopSequences?": [str], "responseMimeType?": str, "responseJsonSchema?": dict,
    "thinkingConfig?": _THINKING,
}  # fmt: skip
_CALLING = {"mode?": str, "allowedFunctionNames?": [str]}
_SHAPE: dict[str, Any] = {
    "contents": [{"role": frozenset({"user", "model"}), "parts": [_PART]}],
    "systemInstruction?": {"parts": [{"text": str}]},
    "tools?": [{"functionDeclarations?": [_FUNCTION]}],
    "toolConfig?": {"functionCallingConfig?": _CALLING},
    "generationConfig?": _GENERATION,
    "safetySettings?": [dict],
    "labels?": dict,
    **dict.fromkeys(("serviceTier?", "cachedContent?"), str),
}
_MODES = {"AUTO": "auto", "ANY": "required", "NONE": "none"}
_SIGNED = b"signed-"
_FOREIGN = "skip_thought_signature_validator"


def conversation(body: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the request as one of chat completions. Raises `MisfitError`."""
    found = PATH.fullmatch(path)
    if found is None:
        raise MisfitError("path", "names no model")
    fit(body, _SHAPE, unknown="Unknown name: Cannot find field")
    contents = body["contents"]
    if not contents:
        raise MisfitError("contents", "contents is not specified")
    _check_results(contents)
    system = body.get("systemInstruction") or {}
    messages = [{"role": "system", "content": _text(system)}] if _text(system) else []
    for number, turn in enumerate(contents):
        messages += _messages(turn, f"contents[{number}]")
    chat: dict[str, Any] = {"model": found["model"], "messages": messages}
    declared = [
        one for tool in body.get("tools") or () for one in tool.get("functionDeclarations") or ()
    ]
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


def _calls(turn: dict[str, Any]) -> list[dict[str, Any]]:
    return [part["functionCall"] for part in turn["parts"] if part.get("functionCall")]


def _check_results(contents: list[dict[str, Any]]) -> None:
    """Check that the turn after calls has as many responses, and no other turn has any."""
    open_calls = 0
    for number, turn in enumerate([*contents, {"role": "user", "parts": []}]):
        found = sum(1 for part in turn["parts"] if part.get("functionResponse"))
        if found != open_calls:
            raise MisfitError(
                f"contents[{number}]",
                "Please ensure that the number of function response parts is equal to the number "
                "of function call parts of the function call turn.",
            )
        open_calls = len(_calls(turn))


def _messages(turn: dict[str, Any], place: str) -> Iterator[dict[str, Any]]:
    parts = turn["parts"]
    if not parts:
        raise MisfitError(f"{place}.parts", "must have at least one part")
    if turn["role"] == "model":
        yield _assistant(turn, place)
        return
    if _calls(turn):
        raise MisfitError(place, "Function call parts are of the model's turns")
    for part in parts:
        if answer := part.get("functionResponse"):
            content = str(answer["response"].get("result", ""))
            yield {"role": "tool", "tool_call_id": answer.get("id"), "content": content}
    if rest := [part for part in parts if not part.get("functionResponse")]:
        texts = all(part.get("text") is not None for part in rest)
        yield {"role": "user", "content": _text({"parts": rest}) if texts else rest}


def _assistant(turn: dict[str, Any], place: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _text(turn) or None}
    for part in turn["parts"]:
        given = part.get("thoughtSignature")
        if given not in (None, _FOREIGN) and not _is_ours(given):
            raise MisfitError(place, "Thought signature is not valid")
    signed = [one.get("thoughtSignature") for one in turn["parts"] if one.get("functionCall")]
    if signed and not signed[0]:
        raise MisfitError(
            place, "Function call is missing a thought_signature in functionCall parts"
        )
    if signed:
        message["tool_calls"] = [
            {
                "id": call.get("id"),
                "type": "function",
                "function": {
                    "name": call["name"],
                    "arguments": exact_json.text(call.get("args") or {}),
                },
            }
            for call in _calls(turn)
        ]
    return message


def _text(content: dict[str, Any]) -> str:
    return "".join(part.get("text") or "" for part in content.get("parts") or ())


def _tool(declared: dict[str, Any]) -> dict[str, Any]:
    schema = declared.get("parametersJsonSchema") or {}
    return {"type": "function", "function": {"name": declared["name"], "parameters": schema}}


def _choice(config: dict[str, Any]) -> Any:
    calling = config.get("functionCallingConfig") or {"mode": "AUTO"}
    if calling.get("mode") not in _MODES:
        raise MisfitError("toolConfig.functionCallingConfig.mode", "is no mode")
    named = calling.get("allowedFunctionNames")
    if named:
        return {"type": "function", "function": {"name": named[0]}}
    return _MODES[calling["mode"]]
