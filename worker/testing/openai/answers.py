"""Puts replies, refusals and faults into the answers of a chat completions service. Pure."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from stepfleet.orchestrator.records import exact_json
from stepfleet.worker.testing.openai.completions import DONE, Completion, event
from stepfleet.worker.testing.openai.conversation import Violation
from stepfleet.worker.testing.openai.quirks import quirky_body, quirky_events
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario.faults import Fault, FaultKind
from stepfleet.worker.testing.scenario.limits import Standing
from stepfleet.worker.testing.scenario.replies import (
    EVENTS,
    REFUSED,
    REPLIED,
    Answer,
    Ending,
    Reply,
    Usage,
)

COMPLETIONS = re.compile(r"(?:/openai|/openai/deployments/[^/]+)?(?:/v1)?/chat/completions")
MODELS = ("gpt-4o-mini", "gpt-4o")
"""The names in `/v1/models`; a completion is made under any name."""
_MODELS_PATH = "/v1/models"

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


def models_at(path: str) -> dict[str, Any] | None:
    """Return the listing of models, or one model, at a path; None where it has neither."""
    if path == _MODELS_PATH:
        return {"object": "list", "data": [_model(name) for name in MODELS]}
    name = path.removeprefix(f"{_MODELS_PATH}/")
    return None if name == path else _model(name)


def replying(request: RequestRecord, reply: Reply) -> Answer:
    """Return the answer that carries `reply`, streamed where the request wants it."""
    completion = Completion(reply, request)
    base = Answer(REPLIED, delay=reply.latency, pause=reply.pause, usage=completion.usage)
    if request.streams:
        events = completion.events()
        if reply.quirks:
            events = quirky_events(events, reply.quirks)
        return replace(base, pieces=tuple(events), content_type=EVENTS)
    body = exact_json.dumps(completion.body())
    if reply.quirks:
        body = quirky_body(body, reply.quirks)
    return replace(base, pieces=(body,), length=len(body))


def carrying(
    reply: Reply,
    usage: Usage | None,
    *,
    pieces: Iterable[bytes] | None,
    body: Callable[[], dict[str, Any]],
    content_type: str = EVENTS,
) -> Answer:
    """Return the answer of a reply: the `pieces` of a stream, or without any the whole `body`."""
    answer = Answer(REPLIED, delay=reply.latency, pause=reply.pause, usage=usage)
    if pieces is not None:
        return replace(answer, pieces=tuple(pieces), content_type=content_type)
    whole = exact_json.dumps(body())
    return replace(answer, pieces=(whole,), length=len(whole))


def refusing(violation: Violation) -> Answer:
    """Return the 400 that names what is wrong with the request."""
    return _error(
        REFUSED, HTTPStatus.BAD_REQUEST, "invalid_request_error", None,
        violation.message, violation.field,
    )  # fmt: skip


def failing(fault: Fault, sound: Answer) -> Answer:
    """Return the answer of a fault; `sound` is the one that the request would have got."""
    answer = _refused(fault) if fault.kind in _REFUSALS else _spoiled(fault, sound)
    return delayed(fault, answer)


def delayed(fault: Fault, answer: Answer) -> Answer:
    """Return the answer of a fault with its outcome, its wait and its `Retry-After`."""
    if fault.retry_after is not None:
        headers = {**answer.headers, "Retry-After": f"{fault.retry_after:g}"}
        answer = replace(answer, headers=headers)
    delay = answer.delay if fault.after is None else fault.after
    return replace(answer, outcome=str(fault.kind), delay=delay)


def too_long(tokens: int, window: int) -> str:
    """Return why a prompt of so many tokens is refused."""
    return (
        f"This model's maximum context length is {window} tokens. However, your messages resulted "
        f"in {tokens} tokens. Please reduce the length of the messages."
    )


def limit_headers(standings: Mapping[str, Standing], wait: float | None) -> dict[str, str]:
    """Return the headers that show how a key stands to its limits; `wait` in those of a 429."""
    headers = {} if wait is None else {"retry-after-ms": f"{math.ceil(wait * 1000)}"}
    for kind in standings.keys() & {"requests", "tokens"}:
        standing = standings[kind]
        headers[f"x-ratelimit-limit-{kind}"] = f"{standing.limit:.0f}"
        headers[f"x-ratelimit-remaining-{kind}"] = f"{int(standing.remaining)}"
        headers[f"x-ratelimit-reset-{kind}"] = _duration(standing.reset)
    return headers


def _duration(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    if minutes:
        return f"{minutes:.0f}m{rest:.3g}s"
    return f"{seconds:.3g}s" if seconds >= 1 else f"{math.ceil(seconds * 1000)}ms"


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "stepfleet"}


def _refused(fault: Fault) -> Answer:
    status, kind, code, message = _REFUSALS[fault.kind]
    return _error(str(fault.kind), status, kind, code, fault.message or message, None)


def _spoiled(fault: Fault, sound: Answer) -> Answer:
    match fault.kind:
        case FaultKind.MISSING_USAGE | FaultKind.REFUSAL:
            return sound  # the reply was made so
        case FaultKind.ERROR_EVENT | FaultKind.FAILED:
            why = fault.message or "The server had an error while processing your request"
            error = {"message": why, "type": "server_error", "param": None, "code": None}
            return with_error(sound, event({"error": error}), {"error": error})
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
            streams = sound.length is None
            return replace(_half(sound), ending=Ending.COMPLETE if streams else Ending.CLOSE)
    return replace(sound, pieces=(), usage=None, ending=Ending.SILENCE)


def _half(sound: Answer) -> Answer:
    if sound.length is None:
        pieces = sound.pieces[: len(sound.pieces) // 2]
    else:
        pieces = tuple(piece[: len(piece) // 2] for piece in sound.pieces)
    return replace(sound, pieces=pieces, usage=None)


def with_error(sound: Answer, last: bytes, body: Mapping[str, Any]) -> Answer:
    """Return a stream that ends in its middle with the event `last`, or a whole answer `body`."""
    if sound.length is None:
        half = _half(sound)
        return replace(half, pieces=(*half.pieces, last))
    data = exact_json.dumps(body)
    return replace(sound, pieces=(data,), length=len(data), usage=None)


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
    body = exact_json.dumps({"error": error})
    delay = 0.0 if outcome == REFUSED else None
    return Answer(outcome, status, (body,), length=len(body), delay=delay)
