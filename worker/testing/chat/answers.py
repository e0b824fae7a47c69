"""Decides the bytes of an answer and how the connection ends after them. Pure; sends nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from http import HTTPStatus

import orjson

from stepfleet.worker.testing.chat.completions import DONE, Completion, event
from stepfleet.worker.testing.chat.conversation import Violation
from stepfleet.worker.testing.chat.faults import Fault, FaultKind
from stepfleet.worker.testing.chat.quirks import quirky_body, quirky_events
from stepfleet.worker.testing.chat.replies import Reply, Usage
from stepfleet.worker.testing.chat.requests import RequestRecord

JSON = "application/json"
EVENTS = "text/event-stream"
REPLIED = "replied"
REFUSED = "refused"


class Ending(StrEnum):
    """What happens after the last byte."""

    COMPLETE = "complete"
    CLOSE = "close"
    """The connection closes although more was announced."""
    RESET = "reset"
    """The connection is reset: before any byte where there are none."""
    SILENCE = "silence"
    """Nothing, until the client goes away."""


@dataclass(frozen=True)
class Answer:
    """What is sent: a body in pieces. `length` (bytes) is announced; None means chunked.

    `delay` and `pause` are the seconds before the first piece and between the pieces; a delay of
    None leaves it to the server.
    """

    outcome: str
    status: int = HTTPStatus.OK
    pieces: tuple[bytes, ...] = ()
    content_type: str = JSON
    length: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    ending: Ending = Ending.COMPLETE
    delay: float | None = None
    pause: float = 0.0
    usage: Usage | None = None


_REFUSALS: dict[FaultKind | str, tuple[HTTPStatus, str, str | None, str]] = {
    FaultKind.RATE_LIMITED: (
        HTTPStatus.TOO_MANY_REQUESTS, "requests", "rate_limit_exceeded", "Rate limit reached"),
    FaultKind.SERVER_ERROR: (
        HTTPStatus.INTERNAL_SERVER_ERROR, "server_error", None, "The server had an error"),
    FaultKind.OVERLOADED: (
        HTTPStatus.SERVICE_UNAVAILABLE, "server_error", None, "The engine is overloaded"),
    FaultKind.CONTEXT_LENGTH_EXCEEDED: (
        HTTPStatus.BAD_REQUEST, "invalid_request_error", "context_length_exceeded",
        "This model's maximum context length is 8192 tokens"),
    FaultKind.CONTENT_FILTER: (
        HTTPStatus.BAD_REQUEST, "invalid_request_error", "content_filter",
        "The prompt was refused by the content filter"),
    FaultKind.UNAUTHORIZED: (
        HTTPStatus.UNAUTHORIZED, "invalid_request_error", "invalid_api_key", "Incorrect API key"),
    FaultKind.FORBIDDEN: (
        HTTPStatus.FORBIDDEN, "permission_error", None, "The key may not use this model"),
    FaultKind.NOT_FOUND: (
        HTTPStatus.NOT_FOUND, "invalid_request_error", "model_not_found",
        "The model does not exist"),
}  # fmt: skip


def replying(request: RequestRecord, reply: Reply) -> Answer:
    """Return the answer that carries `reply`, streamed where the request asks for it."""
    completion = Completion(reply, request)
    base = Answer(REPLIED, delay=reply.latency, pause=reply.pause, usage=completion.usage)
    if request.streams:
        events = completion.events()
        if reply.quirks:
            events = quirky_events(events, reply.quirks)
        return replace(base, pieces=tuple(events), content_type=EVENTS)
    body = orjson.dumps(completion.body())
    if reply.quirks:
        body = quirky_body(body, reply.quirks)
    return replace(base, pieces=(body,), length=len(body))


def refusing(violation: Violation) -> Answer:
    """Return the 400 that names what is wrong with the request."""
    return _error(
        REFUSED, HTTPStatus.BAD_REQUEST, "invalid_request_error", None,
        violation.message, violation.field,
    )  # fmt: skip


def failing(fault: Fault, sound: Answer) -> Answer:
    """Return the answer of a fault; `sound` is the one that the request would have got."""
    answer = _refused(fault) if fault.kind in _REFUSALS else _spoiled(fault, sound)
    if fault.retry_after is not None:
        headers = {**answer.headers, "Retry-After": f"{fault.retry_after:g}"}
        answer = replace(answer, headers=headers)
    delay = answer.delay if fault.after is None else fault.after
    return replace(answer, outcome=str(fault.kind), delay=delay)


def _refused(fault: Fault) -> Answer:
    status, kind, code, message = _REFUSALS[fault.kind]
    return _error(str(fault.kind), status, kind, code, fault.message or message, None)


def _spoiled(fault: Fault, sound: Answer) -> Answer:
    match fault.kind:
        case FaultKind.MISSING_USAGE:
            return sound  # the reply was made without it
        case FaultKind.BROKEN_JSON:
            return _body(sound, b'{"id": "chatcmpl-', done=False)
        case FaultKind.EMPTY_CHOICES:
            return _body(sound, _without_message([]))
        case FaultKind.NO_MESSAGE:
            return _body(sound, _without_message([{"index": 0, "finish_reason": "stop"}]))
    return _cut(fault, sound)


def _cut(fault: Fault, sound: Answer) -> Answer:
    match fault.kind:
        case FaultKind.RESET:
            return replace(sound, pieces=(), usage=None, ending=Ending.RESET)
        case FaultKind.RESET_MID_BODY:
            return replace(_half(sound), ending=Ending.RESET)
        case FaultKind.TRUNCATED_STREAM:
            # A stream ends as if it were whole: only the missing [DONE] shows it.
            streams = sound.content_type == EVENTS
            return replace(_half(sound), ending=Ending.COMPLETE if streams else Ending.CLOSE)
    return replace(sound, pieces=(), usage=None, ending=Ending.SILENCE)


def _half(sound: Answer) -> Answer:
    if sound.content_type == EVENTS:
        pieces = sound.pieces[: len(sound.pieces) // 2]
    else:
        pieces = tuple(piece[: len(piece) // 2] for piece in sound.pieces)
    return replace(sound, pieces=pieces, usage=None)


def _body(sound: Answer, body: bytes, *, done: bool = True) -> Answer:
    if sound.content_type == EVENTS:
        pieces = (b"data: " + body + b"\n\n", *((DONE,) if done else ()))
        return replace(sound, pieces=pieces, usage=None)
    return replace(sound, pieces=(body,), length=len(body), usage=None)


def _without_message(choices: list[dict[str, object]]) -> bytes:
    payload = {"id": "chatcmpl-empty", "object": "chat.completion", "choices": choices}
    return event(payload).removeprefix(b"data: ").strip()


def _error(
    outcome: str, status: HTTPStatus, kind: str, code: str | None, message: str, param: str | None
) -> Answer:
    error = {"message": message, "type": kind, "param": param, "code": code}
    body = orjson.dumps({"error": error})
    delay = 0.0 if outcome == REFUSED else None
    return Answer(outcome, status, (body,), length=len(body), delay=delay)
