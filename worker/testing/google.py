"""Google's Gemini: requests as they arrive, answers as they are sent. Pure."""

import base64
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

from stepfleet.orchestrator.records import exact_json
from stepfleet.worker.testing.openai import answers as chat
from stepfleet.worker.testing.openai.answers import (
    calls_of,
    event,
    pieces_of,
)
from stepfleet.worker.testing.openai.conversation import Violation
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import (
    EVENTS,
    REFUSED,
    Fault,
    FaultKind,
    HttpAnswer,
    Reply,
    Usage,
    name_of,
)
from stepfleet.worker.testing.wire import MisfitError, Wire, fit

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
        raise MisfitError("toolConfig.functionCallingConfig.mode", "is not a mode")
    named = calling.get("allowedFunctionNames")
    if named:
        return {"type": "function", "function": {"name": named[0]}}
    return _MODES[calling["mode"]]


def too_long(tokens: int, window: int) -> str:
    """Return why a prompt of that many tokens is refused."""
    return (
        f"The input token count ({tokens}) exceeds the maximum number of tokens allowed ({window})."
    )


_REASONS = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS",
            "content_filter": "SAFETY"}  # fmt: skip
_REFUSALS: dict[FaultKind | str, tuple[HTTPStatus, str, str]] = {
    FaultKind.RATE_LIMITED: (
        HTTPStatus.TOO_MANY_REQUESTS, "RESOURCE_EXHAUSTED", "You exceeded your current quota"),
    FaultKind.SERVER_ERROR: (
        HTTPStatus.INTERNAL_SERVER_ERROR, "INTERNAL", "An internal error has occurred"),
    FaultKind.OVERLOADED: (
        HTTPStatus.SERVICE_UNAVAILABLE, "UNAVAILABLE", "The model is overloaded"),
    FaultKind.CONTEXT_LENGTH_EXCEEDED: (
        HTTPStatus.BAD_REQUEST, "INVALID_ARGUMENT",
        too_long(9000, 8192)),
    FaultKind.UNAUTHORIZED: (
        HTTPStatus.UNAUTHORIZED, "UNAUTHENTICATED", "API key not valid. Pass a valid API key."),
    FaultKind.FORBIDDEN: (
        HTTPStatus.FORBIDDEN, "PERMISSION_DENIED", "The caller does not have permission"),
    FaultKind.NOT_FOUND: (HTTPStatus.NOT_FOUND, "NOT_FOUND", "models/unknown is not found"),
}  # fmt: skip


def replying(request: RequestRecord, reply: Reply) -> HttpAnswer:
    """Return the answer that carries `reply`, streamed where the request wants it."""
    usage = reply.usage if reply.send_usage else None
    content = _Content(reply, request, usage)
    pieces = content.events() if request.streams else None
    return chat.carrying(reply, usage, pieces=pieces, body=content.whole)


def refusing(violation: Violation) -> HttpAnswer:
    """Return the 400 that names what is wrong with the request."""
    answer = _error(REFUSED, HTTPStatus.BAD_REQUEST, "INVALID_ARGUMENT", str(violation))
    return replace(answer, delay=0.0)


def failing(fault: Fault, sound: HttpAnswer) -> HttpAnswer:
    """Return the answer of a fault; `sound` is the one that the request would have got."""
    if fault.kind in (FaultKind.ERROR_EVENT, FaultKind.FAILED):
        why = fault.message or "The model is overloaded. Please try again later."
        error = {"error": {"code": 503, "message": why, "status": "UNAVAILABLE"}}
        return chat.delayed(fault, chat.with_error(sound, event(error), error))
    if fault.kind is FaultKind.CONTENT_FILTER:
        return chat.delayed(fault, _blocked(sound))
    if fault.kind not in _REFUSALS:
        return chat.failing(fault, sound)
    status, kind, message = _REFUSALS[fault.kind]
    failed = _error(str(fault.kind), status, kind, fault.message or message, fault.retry_after)
    return chat.delayed(replace(fault, retry_after=None), failed)


def _blocked(sound: HttpAnswer) -> HttpAnswer:
    """Return the answer to a prompt that the service's filter refuses: 200, without candidates."""
    body: dict[str, Any] = {"promptFeedback": {"blockReason": "PROHIBITED_CONTENT"}}
    if sound.usage is not None:
        count = sound.usage.prompt_tokens
        body["usageMetadata"] = {"promptTokenCount": count, "totalTokenCount": count}
    usage = replace(sound.usage, completion_tokens=0) if sound.usage else None
    streams = sound.content_type == EVENTS
    data = event(body) if streams else exact_json.dumps(body)
    return replace(sound, pieces=(data,), length=None if streams else len(data), usage=usage)


# A 429 has its hint in the body, and no answer has headers of rate limits.
WIRE = Wire(
    conversation,
    replying,
    refusing,
    failing,
    too_long=too_long,
    limit_headers=lambda _standings, _wait: {},
    id_header="",
)


@dataclass(frozen=True)
class _Content:
    """A reply with the place in a conversation that it answers."""

    reply: Reply
    request: RequestRecord
    usage: Usage | None

    def body(self, parts: list[dict[str, Any]], *, ended: bool) -> dict[str, Any]:
        reason = _REASONS.get(self.reply.ends_with, self.reply.ends_with)
        reason = reason if self.reply.refusal is None else "SAFETY"
        candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": 0}
        body: dict[str, Any] = {
            "candidates": [{**candidate, "finishReason": reason} if ended else candidate],
            "responseId": f"req-{self.request.number}",
            "modelVersion": self.reply.model or self.request.body["model"],
        }
        if ended and self.usage is not None:
            body["usageMetadata"] = self._usage(self.usage)
            if self.reply.service_tier:
                body["usageMetadata"]["serviceTier"] = self.reply.service_tier
        return body

    def whole(self) -> dict[str, Any]:
        return self.body([*self.parts()], ended=True)

    def events(self) -> Iterator[bytes]:
        for part in self.parts():
            if "text" in part:
                for piece in pieces_of(part["text"], self.reply.piece):
                    yield event(self.body([{**part, "text": piece}], ended=False))
            else:
                yield event(self.body([part], ended=False))
        yield event(self.body([], ended=True))

    def parts(self) -> Iterator[dict[str, Any]]:
        thought = self.reply.reasoning
        signed = {} if thought is None else {"thoughtSignature": signature(thought)}
        if thought is not None:
            yield {"text": thought, "thought": True}
        if self.reply.content:
            unsigned = {"text": self.reply.content}
            yield unsigned if self.reply.tool_calls else {**unsigned, **signed}
        for index, (made, call, arguments) in enumerate(calls_of(self.request, self.reply)):
            identity = {} if call.omit_id else {"id": made}
            named = {**identity, "name": call.name, "args": arguments}
            yield {"functionCall": named, **({} if index else signed)}

    @staticmethod
    def _usage(usage: Usage) -> dict[str, Any]:
        return {
            "promptTokenCount": usage.prompt_tokens,
            "candidatesTokenCount": usage.completion_tokens - usage.reasoning_tokens,
            "thoughtsTokenCount": usage.reasoning_tokens,
            "cachedContentTokenCount": usage.cached_tokens,
            "totalTokenCount": usage.prompt_tokens + usage.completion_tokens,
        }


def _error(
    outcome: str, status: HTTPStatus, kind: str, message: str, wait: float | None = None
) -> HttpAnswer:
    error: dict[str, Any] = {"code": int(status), "message": message, "status": kind}
    if wait is not None:
        hint = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": f"{wait:g}s"}
        error["details"] = [hint]
    body = exact_json.dumps({"error": error})
    return HttpAnswer(outcome, status, (body,), length=len(body))
