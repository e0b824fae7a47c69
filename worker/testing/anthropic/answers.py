"""Puts replies, refusals and faults into the answers of Messages, whole or as events."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Any

from stepfleet.orchestrator.records import exact_json
from stepfleet.worker.testing.anthropic.conversation import (
    conversation,
    marked_blocks,
    signature,
)
from stepfleet.worker.testing.openai import answers as chat
from stepfleet.worker.testing.openai.completions import calls_of, pieces_of
from stepfleet.worker.testing.openai.conversation import Violation
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario.faults import Fault, FaultKind
from stepfleet.worker.testing.scenario.latency import name_of
from stepfleet.worker.testing.scenario.limits import Standing
from stepfleet.worker.testing.scenario.prompt_cache import marked
from stepfleet.worker.testing.scenario.replies import (
    JSON,
    REFUSED,
    Answer,
    Reply,
    Usage,
)
from stepfleet.worker.testing.wire import Wire

PATH = "/v1/messages"
_OVERLOADED = 529


def too_long(tokens: int, window: int) -> str:
    """Return why a prompt of so many tokens is refused."""
    return f"prompt is too long: {tokens} tokens > {window} maximum"


_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens",
            "content_filter": "refusal"}  # fmt: skip
_REFUSALS: dict[FaultKind | str, tuple[int, str, str]] = {
    FaultKind.RATE_LIMITED: (
        HTTPStatus.TOO_MANY_REQUESTS, "rate_limit_error", "This request would exceed your limit"),
    FaultKind.SERVER_ERROR: (
        HTTPStatus.INTERNAL_SERVER_ERROR, "api_error", "Internal server error"),
    FaultKind.OVERLOADED: (_OVERLOADED, "overloaded_error", "Overloaded"),
    FaultKind.CONTEXT_LENGTH_EXCEEDED: (
        HTTPStatus.BAD_REQUEST, "invalid_request_error",
        too_long(208_310, 200_000)),
    FaultKind.CONTENT_FILTER: (
        HTTPStatus.BAD_REQUEST, "invalid_request_error",
        "Output blocked by content filtering policy"),
    FaultKind.UNAUTHORIZED: (
        HTTPStatus.UNAUTHORIZED, "authentication_error", "invalid x-api-key"),
    FaultKind.FORBIDDEN: (
        HTTPStatus.FORBIDDEN, "permission_error", "The key may not use this model"),
    FaultKind.NOT_FOUND: (HTTPStatus.NOT_FOUND, "not_found_error", "model: unknown"),
}  # fmt: skip


def replying(request: RequestRecord, reply: Reply) -> Answer:
    """Return the answer that carries `reply`, streamed where the request wants it."""
    usage = reply.usage if reply.send_usage else None
    message = _Message(reply, request, usage)
    pieces = message.events() if request.streams else None
    return chat.carrying(reply, usage, pieces=pieces, body=message.body)


def refusing(violation: Violation) -> Answer:
    """Return the 400 that names what is wrong with the request."""
    answer = _error(REFUSED, HTTPStatus.BAD_REQUEST, "invalid_request_error", str(violation))
    return replace(answer, delay=0.0)


def failing(fault: Fault, sound: Answer) -> Answer:
    """Return the answer of a fault; `sound` is the one that the request would have got."""
    if fault.kind in _REFUSALS:
        status, kind, message = _REFUSALS[fault.kind]
        sound = replace(sound, pieces=())
        failed = _error(str(fault.kind), status, kind, fault.message or message)
    elif fault.kind in (FaultKind.EMPTY_CHOICES, FaultKind.NO_MESSAGE):
        body = exact_json.dumps({"id": "msg_empty", "type": "message", "role": "assistant"})
        failed = replace(sound, pieces=(body,), length=len(body), usage=None)
        failed = replace(failed, content_type=JSON)
    elif fault.kind in (FaultKind.ERROR_EVENT, FaultKind.FAILED):
        error = {"type": "overloaded_error", "message": fault.message or "Overloaded"}
        body_of = {"type": "error", "error": error, "request_id": "req_1"}
        failed = chat.with_error(sound, _event("error", error=error), body_of)
    else:
        return chat.failing(fault, sound)
    return chat.delayed(fault, failed)


def limit_headers(standings: Mapping[str, Standing], _wait: float | None) -> dict[str, str]:
    """Return the headers that show how a key stands to its limits."""
    headers: dict[str, str] = {}
    for kind, standing in standings.items():
        name = f"anthropic-ratelimit-{kind.replace('_', '-')}"
        moment = datetime.now(UTC) + timedelta(seconds=standing.reset)
        headers[f"{name}-limit"] = f"{standing.limit:.0f}"
        headers[f"{name}-remaining"] = f"{int(standing.remaining)}"
        headers[f"{name}-reset"] = moment.isoformat(timespec="seconds").replace("+00:00", "Z")
    return headers


WIRE = Wire(
    conversation,
    replying,
    refusing,
    failing,
    prompt=lambda request: marked(request.model, marked_blocks(request.sent)),
    too_long=too_long,
    limit_headers=limit_headers,
    free_reads=True,
    id_header="request-id",
)


@dataclass(frozen=True)
class _Message:
    """A reply with the place in a conversation that it answers."""

    reply: Reply
    request: RequestRecord
    usage: Usage | None

    def body(self) -> dict[str, Any]:
        return self._head() | {
            "content": [*self._blocks()],
            **self._stop(),
            **({"usage": self._usage()} if self.usage else {}),
        }

    def events(self) -> Iterator[bytes]:
        usage = {"usage": {**self._usage(), "output_tokens": 1}} if self.usage else {}
        head = self._head() | {"content": [], "stop_reason": None} | usage
        yield _event("message_start", message=head)
        yield _event("ping")
        for index, block in enumerate(self._blocks()):
            yield from self._block(index, block)
        yield _event(
            "message_delta",
            delta={**self._stop(), "stop_sequence": None},
            **({"usage": {"output_tokens": self._usage()["output_tokens"]}} if self.usage else {}),
        )
        yield _event("message_stop")

    def _block(self, index: int, block: dict[str, Any]) -> Iterator[bytes]:
        kind = block["type"]
        name = {"tool_use": "input"}.get(kind, kind)
        whole = exact_json.text(block[name]) if kind == "tool_use" else block[name]
        signed = {"signature": ""} if kind == "thinking" else {}
        empty: dict[str, Any] = {**block, **signed, name: {} if kind == "tool_use" else ""}
        yield _event("content_block_start", index=index, content_block=empty)
        delta = {"tool_use": "input_json_delta"}.get(kind, f"{kind}_delta")
        part = "partial_json" if kind == "tool_use" else name
        for piece in pieces_of(whole, self.reply.piece):
            change = {"type": delta, part: piece}
            yield _event("content_block_delta", index=index, delta=change)
        if signed:
            change = {"type": "signature_delta", "signature": block["signature"]}
            yield _event("content_block_delta", index=index, delta=change)
        yield _event("content_block_stop", index=index)

    def _stop(self) -> dict[str, Any]:
        if (why := self.reply.refusal) is not None:
            details = {"type": "refusal", "category": None, "explanation": why}
            return {"stop_reason": "refusal", "stop_details": details}
        return {"stop_reason": _REASONS.get(self.reply.ends_with, self.reply.ends_with)}

    def _head(self) -> dict[str, Any]:
        return {
            "id": f"msg_{name_of(self.request.key, self.request.turn)}",
            "type": "message",
            "role": "assistant",
            "model": self.reply.model or self.request.body["model"],
            "stop_sequence": None,
        }

    def _blocks(self) -> Iterator[dict[str, Any]]:
        if self.reply.reasoning is not None:
            block = {"type": "thinking", "thinking": self.reply.reasoning}
            yield {**block, "signature": signature(block)}
        if self.reply.content:
            yield {"type": "text", "text": self.reply.content}
        for identity, call, arguments in calls_of(self.request, self.reply):
            yield {"type": "tool_use", "id": identity, "name": call.name, "input": arguments}

    def _usage(self) -> dict[str, Any]:
        usage = self.usage or Usage(0, 0)
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens,
            "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation_input_tokens": usage.cache_write_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
            "service_tier": self.reply.service_tier or "standard",
        }


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + exact_json.dumps({"type": kind, **fields}) + b"\n\n"


def _error(outcome: str, status: int, kind: str, message: str) -> Answer:
    error = {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"}
    body = exact_json.dumps(error)
    return Answer(outcome, status, (body,), length=len(body))
