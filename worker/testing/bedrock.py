"""Converse of Amazon Bedrock: requests as they arrive, answers as they are sent."""

import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

from stepfleet.orchestrator.records import exact_json
from stepfleet.worker.testing.anthropic import too_long
from stepfleet.worker.testing.openai import answers as chat
from stepfleet.worker.testing.openai.answers import calls_of, pieces_of
from stepfleet.worker.testing.openai.conversation import Violation
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import (
    REFUSED,
    Fault,
    FaultKind,
    HttpAnswer,
    Reply,
    Usage,
    marked,
)
from stepfleet.worker.testing.wire import PLAIN_ID, MisfitError, Wire, fit, fit_id

PATH = re.compile(r"/model/(?P<model>.+)/(?P<verb>converse|converse-stream)")
_SOURCE = {"bytes?": str, "s3Location?": {"uri": str}}
_POINT = {"type": frozenset({"default"}), "ttl?": frozenset({"5m", "1h"})}
_RESULT: dict[str, Any] = {
    "text?": str,
    "image?": {"format": frozenset({"png", "jpeg", "gif", "webp"}), "source": _SOURCE},
    "document?": {
        "name": str, "source": dict, "format?": frozenset(
            {"pdf", "csv", "doc", "docx", "xls", "xlsx", "html", "txt", "md"})},
    "video?": dict,
    "searchResult?": dict,
}  # fmt: skip
_BLOCK: dict[str, Any] = {
    **_RESULT,
    "audio?": {"format": str, "source": _SOURCE},
    "toolUse?": {"toolUseId": str, "name": str, "input": dict},
    "toolResult?": {
        "toolUseId": str, "content": [{**_RESULT, "json?": dict}],
        "status?": frozenset({"success", "error"}),
    },
    "reasoningContent?": {
        "reasoningText?": {"text": str, "signature?": str}, "redactedContent?": str},
    "cachePoint?": _POINT,
    "guardContent?": dict,
    "citationsContent?": dict,
}  # fmt: skip
_SHAPE: dict[str, Any] = {
    "messages": [{"role": frozenset({"user", "assistant"}), "content": [_BLOCK]}],
    "system?": [{"text?": str, "cachePoint?": _POINT, "guardContent?": dict}],
    "toolConfig?": {
        "tools": [{"cachePoint?": _POINT, "systemTool?": dict, "toolSpec?": {
            "name": str, "inputSchema": {"json": dict}, "description?": str, "strict?": bool}}],
        "toolChoice?": {"auto?": dict, "any?": dict, "tool?": {"name": str}},
    },
    "inferenceConfig?": {
        "maxTokens?": int, "temperature?": float, "topP?": float, "stopSequences?": [str]},
    "serviceTier?": {"type": frozenset({"priority", "default", "flex", "reserved"})},
    "outputConfig?": {"effort?": str, "textFormat?": {
        "type": frozenset({"json_schema"}),
        "structure": {"jsonSchema": {"schema": str, "name?": str, "description?": str}}}},
    "additionalModelResponseFieldPaths?": [str],
    "additionalModelRequestFields?": {"thinking?": {"type": str, "budget_tokens?": int}},
    **dict.fromkeys(("guardrailConfig?", "promptVariables?", "requestMetadata?",
                     "performanceConfig?"), dict),
}  # fmt: skip
_LONGEST_NAME = 200
_MOST_MARKS = 4
_DOCUMENTS_NAME = re.compile(r"[A-Za-z0-9()\[\]-]+(?: [A-Za-z0-9()\[\]-]+)*")


def conversation(body: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the request as one of chat completions. Raises `MisfitError`."""
    found = PATH.fullmatch(path)
    if found is None:
        raise MisfitError("path", "names no model")
    fit(body, _SHAPE, index=".{}", unknown="extraneous key is not permitted")
    _check(body)
    system = _text(body.get("system") or [])
    messages = [{"role": "system", "content": system}] if system else []
    for number, turn in enumerate(body["messages"]):
        messages += _messages(turn, f"messages.{number}")
    chat: dict[str, Any] = {"model": found["model"], "messages": messages}
    if config := body.get("toolConfig"):
        chat["tools"] = [_tool(one["toolSpec"]) for one in config["tools"] if one.get("toolSpec")]
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
    config = body.get("toolConfig") or {}
    blocks = [*config.get("tools", ()), *(body.get("system") or ())]
    fixed = len(blocks)
    for turn in body["messages"]:
        blocks += ({"role": turn["role"], **block} for block in turn["content"])
    # How the model chooses tools and thinks belongs to the messages.
    own = {name: body.get(name) for name in ("additionalModelRequestFields", "outputConfig")}
    blocks[fixed] = {**blocks[fixed], **own, "toolChoice": config.get("toolChoice")}
    found: list[tuple[bytes, bool]] = []
    for block in blocks:
        if not block.get("cachePoint"):
            found.append((exact_json.dumps(block), False))
        elif found:
            found[-1] = (found[-1][0], True)
    return found


def signature(text: str) -> str:
    """Return the signature that the server gives reasoning."""
    return f"signed-{len(text)}-{text[:8]}"


def _check(body: dict[str, Any]) -> None:
    turns = body["messages"]
    if not turns or turns[0]["role"] != "user":
        raise MisfitError("messages", "A conversation must start with a user message")
    names: set[str] = set()
    used: list[str] = []
    for number, turn in enumerate([*turns, {"role": "user", "content": [{"text": "."}]}]):
        place = f"messages.{number}"
        if number < len(turns) and number % 2 != (turn["role"] == "assistant"):
            raise MisfitError(f"{place}.role", "roles must alternate between user and assistant")
        if not turn["content"]:
            raise MisfitError(f"{place}.content", "must not be empty")
        _check_blocks(turn["content"], f"{place}.content", names)
        used = _check_results(turn, place, used)
    _check_thought(body, turns)
    if sum(marked for _, marked in marked_blocks(body)) > _MOST_MARKS:
        raise MisfitError("cachePoint", "at most 4 are allowed")


def _check_results(turn: dict[str, Any], place: str, used: list[str]) -> list[str]:
    """Check that a turn answers the calls of the one before; return its own calls."""
    results = [one["toolResult"]["toolUseId"] for one in _of(turn, "toolResult")]
    if len(results) > len(used):
        why = (
            "The number of toolResult blocks exceeds the number of toolUse blocks of previous turn"
        )
        raise MisfitError(place, why)
    if missing := [one for one in used if one not in results]:
        raise MisfitError(place, f"Expected toolResult blocks for the Ids: {', '.join(missing)}")
    return [one["toolUse"]["toolUseId"] for one in _of(turn, "toolUse")]


def _check_thought(body: dict[str, Any], turns: list[dict[str, Any]]) -> None:
    """Check that the answer whose calls have just been answered begins with thinking."""
    thinking = (body.get("additionalModelRequestFields") or {}).get("thinking") or {}
    if thinking.get("type") != "enabled" or not _of(turns[-1], "toolResult"):
        return
    if not turns[-2]["content"][0].get("reasoningContent"):
        raise MisfitError(
            f"messages.{len(turns) - 2}.content.0.type",
            "Expected `thinking` or `redacted_thinking`. When `thinking` is enabled, a final "
            "`assistant` message must start with a thinking block",
        )


def _of(turn: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [block for block in turn["content"] if block.get(kind)]


def _check_blocks(blocks: list[dict[str, Any]], place: str, names: set[str]) -> None:
    kinds = [[kind for kind, one in block.items() if one is not None] for block in blocks]
    for number, block in enumerate(blocks):
        where = f"{place}.{number}"
        if len(kinds[number]) != 1 or f"{kinds[number][0]}?" not in {*_BLOCK, "json?"}:
            raise MisfitError(where, "must set one of the known kinds")
        if not str(block.get("text", "-")).strip():
            raise MisfitError(where, "The text field in the ContentBlock object is blank")
        if result := block.get("toolResult"):
            _check_blocks(result["content"], f"{where}.toolResult.content", names)
        if document := block.get("document"):
            _check_name(document["name"], f"{where}.document.name", names)
    if ["document"] in kinds and ["text"] not in kinds and "toolResult" not in place:
        raise MisfitError(place, "a document needs a text with it")


def _check_name(name: str, place: str, names: set[str]) -> None:
    if not _DOCUMENTS_NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        raise MisfitError(
            place,
            "can only contain alphanumeric characters, single whitespace characters, hyphens, "
            "parentheses, and square brackets",
        )
    if name in names:
        raise MisfitError(place, "Duplicate document names are not allowed")
    names.add(name)


def _messages(turn: dict[str, Any], place: str) -> Iterator[dict[str, Any]]:
    blocks = [block for block in turn["content"] if not block.get("cachePoint")]
    if not blocks:
        raise MisfitError(f"{place}.content", "must not be empty")
    if turn["role"] == "assistant":
        yield _assistant(blocks, place)
        return
    results = [block["toolResult"] for block in blocks if block.get("toolResult")]
    if not all(block.get("toolResult") for block in blocks[: len(results)]):
        raise MisfitError(place, "toolResult blocks come first in a user message")
    for given in results:
        content = _text(given["content"])
        yield {"role": "tool", "tool_call_id": given["toolUseId"], "content": content}
    if rest := blocks[len(results) :]:
        texts = all(block.get("text") for block in rest)
        yield {"role": "user", "content": _text(rest) if texts else rest}


def _assistant(blocks: list[dict[str, Any]], place: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _text(blocks) or None}
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        thought = (block.get("reasoningContent") or {}).get("reasoningText")
        if thought and thought.get("signature") != signature(thought["text"]):
            raise MisfitError(f"{place}.content.{number}", "Invalid `signature` in reasoning")
        if calls and block.get("reasoningContent"):
            raise MisfitError(f"{place}.content.{number}", "`thinking` blocks cannot be modified")
        if used := block.get("toolUse"):
            fit_id(used["toolUseId"], PLAIN_ID, f"{place}.content.{number}.toolUse.toolUseId")
            arguments = exact_json.text(used["input"])
            function = {"name": used["name"], "arguments": arguments}
            calls.append({"id": used["toolUseId"], "type": "function", "function": function})
    if blocks[-1].get("reasoningContent"):
        raise MisfitError(place, "The final block in an assistant message cannot be `thinking`.")
    if calls:
        message["tool_calls"] = calls
    return message


def _text(blocks: list[dict[str, Any]]) -> str:
    return "".join(
        one.get("text") or exact_json.text(one["json"])
        for one in blocks
        if one.get("text") or one.get("json") is not None
    )


def _tool(spec: dict[str, Any]) -> dict[str, Any]:
    if spec.get("description") == "":
        raise MisfitError("toolConfig.tools.toolSpec.description", "has at least 1 character")
    function = {"name": spec["name"], "parameters": spec["inputSchema"]["json"]}
    return {"type": "function", "function": function}


def _choice(choice: dict[str, Any]) -> Any:
    if choice.get("tool"):
        return {"type": "function", "function": {"name": choice["tool"]["name"]}}
    return "required" if "any" in choice else "auto"


FRAMES = "application/vnd.amazon.eventstream"
_STRING = 7
_PRELUDE = 12
_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens",
            "content_filter": "content_filtered"}  # fmt: skip
_REFUSALS: dict[FaultKind | str, tuple[int, str, str]] = {
    FaultKind.RATE_LIMITED: (
        HTTPStatus.TOO_MANY_REQUESTS, "ThrottlingException",
        "Too many tokens, please wait before trying again."),
    FaultKind.SERVER_ERROR: (
        HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerException",
        "The system encountered an unexpected error during processing. Try your request again."),
    FaultKind.OVERLOADED: (
        HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailableException",
        "Bedrock is unable to process your request."),
    FaultKind.CONTEXT_LENGTH_EXCEEDED: (
        HTTPStatus.BAD_REQUEST, "ValidationException",
        too_long(208_310, 200_000)),
    FaultKind.CONTENT_FILTER: (
        HTTPStatus.BAD_REQUEST, "ValidationException",
        "Output blocked by content filtering policy"),
    FaultKind.UNAUTHORIZED: (
        HTTPStatus.FORBIDDEN, "UnrecognizedClientException",
        "The security token included in the request is invalid."),
    FaultKind.FORBIDDEN: (
        HTTPStatus.FORBIDDEN, "AccessDeniedException",
        "You don't have access to the model with the specified model ID."),
    FaultKind.NOT_FOUND: (
        HTTPStatus.NOT_FOUND, "ResourceNotFoundException",
        "Could not resolve the foundation model from the provided model identifier."),
}  # fmt: skip


def replying(request: RequestRecord, reply: Reply) -> HttpAnswer:
    """Return the answer that carries `reply`, streamed where the request wants it."""
    usage = reply.usage if reply.send_usage else None
    message = _ConverseMessage(reply, request, usage)
    pieces = message.frames() if request.streams else None
    return chat.carrying(reply, usage, pieces=pieces, body=message.body, content_type=FRAMES)


def refusing(violation: Violation) -> HttpAnswer:
    """Return the 400 that names what is wrong with the request."""
    answer = _error(REFUSED, HTTPStatus.BAD_REQUEST, "ValidationException", str(violation))
    return replace(answer, delay=0.0)


def failing(fault: Fault, sound: HttpAnswer) -> HttpAnswer:
    """Return the answer of a fault; `sound` is the one that the request would have got."""
    if fault.kind in _REFUSALS:
        status, kind, message = _REFUSALS[fault.kind]
        failed = _error(str(fault.kind), status, kind, fault.message or message)
    elif fault.kind in (FaultKind.BROKEN_JSON, FaultKind.EMPTY_CHOICES, FaultKind.NO_MESSAGE):
        body = b'{"output": {"mes' if fault.kind is FaultKind.BROKEN_JSON else b'{"output": {}}'
        failed = replace(sound, pieces=(body,), length=len(body), usage=None)
        if sound.length is None:
            pieces = (frame("messageStart", body), *sound.pieces[-1:])
            failed = replace(failed, pieces=pieces, length=None)
    elif fault.kind in (FaultKind.ERROR_EVENT, FaultKind.FAILED):
        failed = _failed(fault.message or "The model failed. Try your request again.", sound)
    else:
        return chat.failing(fault, sound)
    return chat.delayed(fault, failed)


def _failed(message: str, sound: HttpAnswer) -> HttpAnswer:
    if sound.length is None:
        body = exact_json.dumps({"message": message})
        last = frame("modelStreamErrorException", body, "exception")
        return chat.with_error(sound, last, {})
    return _error("", HTTPStatus.FAILED_DEPENDENCY, "ModelErrorException", message)


WIRE = Wire(
    conversation,
    replying,
    refusing,
    failing,
    prompt=lambda request: marked(request.model, marked_blocks(request.sent)),
    too_long=too_long,
    limit_headers=lambda *_: {},  # the service sends none
    free_reads=True,
    id_header="x-amzn-requestid",
)


def frame(kind: str, payload: bytes, message: str = "event") -> bytes:
    """Return one message of an event stream; `message` may be `exception`."""
    named = {f":{message}-type": kind, ":message-type": message}
    named[":content-type"] = "application/json"
    headers = b"".join(_header(name, value) for name, value in named.items())
    size = _PRELUDE + len(headers) + len(payload) + 4
    prelude = struct.pack("!II", size, len(headers))
    made = prelude + struct.pack("!I", zlib.crc32(prelude)) + headers + payload
    return made + struct.pack("!I", zlib.crc32(made))


def _header(name: str, value: str) -> bytes:
    key, text = name.encode(), value.encode()
    return bytes([len(key)]) + key + struct.pack("!BH", _STRING, len(text)) + text


@dataclass(frozen=True)
class _ConverseMessage:
    """A reply with the place in a conversation that it answers."""

    reply: Reply
    request: RequestRecord
    usage: Usage | None

    def body(self) -> dict[str, Any]:
        message = {"role": "assistant", "content": [*self._blocks()]}
        return {"output": {"message": message}, "stopReason": self._reason, **self._counts()}

    def frames(self) -> Iterator[bytes]:
        yield _event("messageStart", role="assistant")
        for index, block in enumerate(self._blocks()):
            for kind, fields in self._pieces(block):
                yield _event(kind, contentBlockIndex=index, **fields)
        yield _event("messageStop", stopReason=self._reason)
        yield _event("metadata", **self._counts())

    def _pieces(self, block: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        size = self.reply.piece
        if used := block.get("toolUse"):
            known = {"toolUseId": used["toolUseId"], "name": used["name"]}
            yield "contentBlockStart", {"start": {"toolUse": known}}
            for piece in pieces_of(exact_json.text(used["input"]), size):
                yield "contentBlockDelta", {"delta": {"toolUse": {"input": piece}}}
        elif thought := block.get("reasoningContent"):
            for piece in pieces_of(thought["reasoningText"]["text"], size):
                yield "contentBlockDelta", {"delta": {"reasoningContent": {"text": piece}}}
            signed = {"signature": thought["reasoningText"]["signature"]}
            yield "contentBlockDelta", {"delta": {"reasoningContent": signed}}
        else:
            for piece in pieces_of(block["text"], size):
                yield "contentBlockDelta", {"delta": {"text": piece}}
        yield "contentBlockStop", {}

    @property
    def _reason(self) -> str:
        if self.reply.refusal is not None:
            return "content_filtered"
        return _REASONS.get(self.reply.ends_with, self.reply.ends_with)

    def _blocks(self) -> Iterator[dict[str, Any]]:
        if self.reply.reasoning is not None:
            thought = {"text": self.reply.reasoning}
            thought["signature"] = signature(self.reply.reasoning)
            yield {"reasoningContent": {"reasoningText": thought}}
        if text := self.reply.refusal or self.reply.content:
            yield {"text": text}
        for identity, call, arguments in calls_of(self.request, self.reply):
            used = {"toolUseId": identity, "name": call.name, "input": arguments}
            yield {"toolUse": used}

    def _counts(self) -> dict[str, Any]:
        counts: dict[str, Any] = {"metrics": {"latencyMs": 1}}
        if self.reply.service_tier:
            counts["serviceTier"] = {"type": self.reply.service_tier}
        if usage := self.usage:
            given = usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens
            counts["usage"] = {
                "inputTokens": given,
                "outputTokens": usage.completion_tokens,
                "totalTokens": usage.prompt_tokens + usage.completion_tokens,
                "cacheReadInputTokens": usage.cached_tokens,
                "cacheWriteInputTokens": usage.cache_write_tokens,
            }
        return counts


def _event(kind: str, **fields: Any) -> bytes:
    return frame(kind, exact_json.dumps(fields))


def _error(outcome: str, status: int, kind: str, message: str) -> HttpAnswer:
    body = exact_json.dumps({"message": message})
    named = f"{kind}:http://internal.amazon.com/coral/com.amazon.bedrock/"
    headers = {"x-amzn-ErrorType": named}
    return HttpAnswer(outcome, status, (body,), length=len(body), headers=headers)
