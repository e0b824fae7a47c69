"""Puts replies, refusals and faults into the answers of Converse, whole or as event frames."""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

from stepfleet.orchestrator.records import exact_json
from stepfleet.worker.testing.anthropic.answers import too_long
from stepfleet.worker.testing.bedrock.conversation import conversation, marked_blocks, signature
from stepfleet.worker.testing.openai import answers as chat
from stepfleet.worker.testing.openai.completions import calls_of, pieces_of
from stepfleet.worker.testing.openai.conversation import Violation
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario.faults import Fault, FaultKind
from stepfleet.worker.testing.scenario.prompt_cache import marked
from stepfleet.worker.testing.scenario.replies import (
    REFUSED,
    Answer,
    Reply,
    Usage,
)
from stepfleet.worker.testing.wire import Wire

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


def replying(request: RequestRecord, reply: Reply) -> Answer:
    """Return the answer that carries `reply`, streamed where the request wants it."""
    usage = reply.usage if reply.send_usage else None
    message = _Message(reply, request, usage)
    pieces = message.frames() if request.streams else None
    return chat.carrying(reply, usage, pieces=pieces, body=message.body, content_type=FRAMES)


def refusing(violation: Violation) -> Answer:
    """Return the 400 that names what is wrong with the request."""
    answer = _error(REFUSED, HTTPStatus.BAD_REQUEST, "ValidationException", str(violation))
    return replace(answer, delay=0.0)


def failing(fault: Fault, sound: Answer) -> Answer:
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


def _failed(message: str, sound: Answer) -> Answer:
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
class _Message:
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


def _error(outcome: str, status: int, kind: str, message: str) -> Answer:
    body = exact_json.dumps({"message": message})
    named = f"{kind}:http://internal.amazon.com/coral/com.amazon.bedrock/"
    headers = {"x-amzn-ErrorType": named}
    return Answer(outcome, status, (body,), length=len(body), headers=headers)
