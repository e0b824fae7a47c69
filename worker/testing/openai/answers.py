"""Puts replies, refusals and faults into the answers of a chat completions service. Pure."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

from stepfleet.orchestrator.records import exact_json
from stepfleet.worker.testing.openai.conversation import Violation, call_id
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.rate_limits import RateStanding
from stepfleet.worker.testing.scenario import (
    EVENTS,
    REFUSED,
    REPLIED,
    Ending,
    Fault,
    FaultKind,
    HttpAnswer,
    Prompt,
    Quirk,
    Reply,
    ToolCallReply,
    Usage,
    automatic,
    name_of,
)

_DONE = b"data: [DONE]"
_ESCAPE = re.compile(rb"\\.")
_CONTROL = {rb"\n": b"\n", rb"\t": b"\t"}


def quirky_body(body: bytes, quirks: Collection[Quirk]) -> bytes:
    """Return a whole answer with those of the quirks that one can have."""
    payload = exact_json.loads(body)
    for choice in payload["choices"]:
        _change(choice, choice["message"], quirks)
    return _written(payload, quirks)


def quirky_events(events: Sequence[bytes], quirks: Collection[Quirk]) -> list[bytes]:
    """Return the events of a stream with those quirks."""
    names: dict[int, dict[str, Any]] = {}
    changed: list[bytes] = []
    for one in events:
        data = one.strip().removeprefix(b"data: ")
        if one.strip() != _DONE:
            payload = exact_json.loads(data)
            for choice in payload["choices"]:
                _change(choice, choice["delta"], quirks)
                _cut_arguments(choice["delta"], names, quirks)
            data = _written(payload, quirks)
        changed.append(_line(data, quirks))
    return changed


def _change(choice: dict[str, Any], message: dict[str, Any], quirks: Collection[Quirk]) -> None:
    if Quirk.NO_FINISH_REASON in quirks:
        choice.pop("finish_reason", None)
    if Quirk.NO_ROLE in quirks:
        message.pop("role", None)
    if Quirk.CONTENT_PARTS in quirks and isinstance(message.get("content"), str):
        message["content"] = [{"type": "text", "text": message["content"]}]
    if Quirk.ARGUMENTS_OBJECT in quirks:
        for call in message.get("tool_calls", ()):
            text = call["function"]["arguments"]
            call["function"]["arguments"] = exact_json.loads(text) if text else None
    if Quirk.NULLS in quirks:
        for name in ("content", "tool_calls", "refusal", "function_call"):
            message.setdefault(name, None)


def _cut_arguments(
    delta: dict[str, Any], names: dict[int, dict[str, Any]], quirks: Collection[Quirk]
) -> None:
    for call in delta.get("tool_calls") or ():
        known = names.setdefault(
            call["index"], {"id": call.get("id"), "name": call["function"].get("name")}
        )
        if Quirk.REPEATED_NAMES in quirks:
            call["id"] = known["id"]
            call["function"]["name"] = known["name"]
        if Quirk.SHARED_INDEX in quirks:
            call["index"] = 0
        if Quirk.NO_INDEX in quirks:
            del call["index"]


def _written(payload: dict[str, Any], quirks: Collection[Quirk]) -> bytes:
    data = exact_json.dumps(payload)
    if Quirk.RAW_CONTROL in quirks:
        data = _ESCAPE.sub(lambda one: _CONTROL.get(one[0], one[0]), data)
    return data


def _line(data: bytes, quirks: Collection[Quirk]) -> bytes:
    end = b"\r\n" if Quirk.CRLF in quirks else b"\n"
    field = b"data:" if Quirk.NO_SPACE in quirks else b"data: "
    comment = b": keep-alive" + end + end if Quirk.COMMENTS in quirks else b""
    return comment + field + data + end + end


DONE = b"data: [DONE]\n\n"
_CREATED = 1_700_000_000
_CHARACTERS_PER_TOKEN = 4
_TOKENS_PER_MESSAGE = 4


@dataclass(frozen=True)
class Completion:
    """A reply with the place in a conversation that it answers."""

    reply: Reply
    request: RequestRecord

    @property
    def usage(self) -> Usage | None:
        """The token counts that are sent."""
        return self.reply.usage if self.reply.send_usage else None

    def body(self) -> dict[str, Any]:
        """Return the unstreamed completion."""
        message = {"role": "assistant", "content": self.reply.content, **self._extra()}
        if self.reply.tool_calls:
            message["tool_calls"] = [call for _, call in self._calls()]
        choice = {"index": 0, "message": message, "finish_reason": self.reply.ends_with}
        return self._envelope("chat.completion", [choice]) | self._usage()

    def events(self) -> list[bytes]:
        """Return the events of the stream, the closing `[DONE]` among them."""
        wants_usage = (self.request.body.get("stream_options") or {}).get("include_usage")
        nothing = {"usage": None} if wants_usage and self.reply.send_usage else {}
        events = [
            event(self._envelope("chat.completion.chunk", [choice]) | nothing)
            for choice in self._choices()
        ]
        if nothing:
            events.append(event(self._envelope("chat.completion.chunk", []) | self._usage()))
        return [*events, DONE]

    def _choices(self) -> Iterator[dict[str, Any]]:
        yield _choice({"role": "assistant", "content": "", **self._extra()})
        for piece in pieces_of(self.reply.content or "", self.reply.piece):
            yield _choice({"content": piece})
        for index, call in self._calls():
            function = call["function"]
            opening = {**call, "function": {**function, "arguments": ""}}
            yield _choice({"tool_calls": [{"index": index, **opening}]})
            for piece in pieces_of(function["arguments"], self.reply.piece):
                yield _choice({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
        yield _choice({}, self.reply.ends_with)

    def _calls(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for index, call in enumerate(self.reply.tool_calls):
            made = call_id(self.request.key, self.request.turn, index)
            identity = {} if call.omit_id else {"id": made if call.id is None else call.id}
            function = {"name": call.name, "arguments": arguments_text(call)}
            yield index, {**identity, "type": "function", "function": function}

    def _extra(self) -> dict[str, Any]:
        refused = {} if self.reply.refusal is None else {"refusal": self.reply.refusal}
        return {**refused, **self.reply.extra}

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{name_of(self.request.key, self.request.turn)}",
            "object": kind,
            "created": _CREATED + self.request.turn,
            "model": self.reply.model or self.request.body["model"],
            "choices": choices,
            **({"service_tier": tier} if (tier := self.reply.service_tier) else {}),
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.usage
        if usage is None:
            return {}
        return {
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
                "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
                "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            }
        }


def event(payload: Mapping[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + exact_json.dumps(payload) + b"\n\n"


def calls_of(request: RequestRecord, reply: Reply) -> Iterator[tuple[str, ToolCallReply, Any]]:
    """Yield id, call and arguments as data of the calls in a reply."""
    for index, call in enumerate(reply.tool_calls):
        made = call_id(request.key, request.turn, index) if call.id is None else call.id
        yield made, call, exact_json.loads(arguments_text(call))


def arguments_text(call: ToolCallReply) -> str:
    """Return the arguments as they are sent: text unchanged, a mapping as JSON."""
    if isinstance(call.arguments, str):
        return call.arguments
    return exact_json.text(call.arguments)


def estimate(prompt_tokens: int, reply: Reply) -> Usage:
    """Return about the tokens of a call; equal conversations and replies get equal counts."""
    answered = len(reply.content or "")
    answered += sum(len(call.name) + len(arguments_text(call)) for call in reply.tool_calls)
    return Usage(prompt_tokens, _TOKENS_PER_MESSAGE + answered // _CHARACTERS_PER_TOKEN)


def prompt_of(request: RequestRecord) -> Prompt:
    """Return the prompt as the service's cache sees it, which needs no marks."""
    body = request.body
    return automatic(request.model, exact_json.dumps([body.get("tools"), body.get("messages")]))


def _choice(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": finish_reason}


def pieces_of(text: str, size: int) -> Iterator[str]:
    """Return the text in pieces of `size` characters."""
    return (text[start : start + size] for start in range(0, len(text), size))


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


def replying(request: RequestRecord, reply: Reply) -> HttpAnswer:
    """Return the answer that carries `reply`, streamed where the request wants it."""
    completion = Completion(reply, request)
    base = HttpAnswer(REPLIED, delay=reply.latency, pause=reply.pause, usage=completion.usage)
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
) -> HttpAnswer:
    """Return the answer of a reply: the `pieces` of a stream, or without any the whole `body`."""
    answer = HttpAnswer(REPLIED, delay=reply.latency, pause=reply.pause, usage=usage)
    if pieces is not None:
        return replace(answer, pieces=tuple(pieces), content_type=content_type)
    whole = exact_json.dumps(body())
    return replace(answer, pieces=(whole,), length=len(whole))


def refusing(violation: Violation) -> HttpAnswer:
    """Return the 400 that names what is wrong with the request."""
    return _error(
        REFUSED, HTTPStatus.BAD_REQUEST, "invalid_request_error", None,
        violation.message, violation.field,
    )  # fmt: skip


def failing(fault: Fault, sound: HttpAnswer) -> HttpAnswer:
    """Return the answer of a fault; `sound` is the one that the request would have got."""
    answer = _refused(fault) if fault.kind in _REFUSALS else _spoiled(fault, sound)
    return delayed(fault, answer)


def delayed(fault: Fault, answer: HttpAnswer) -> HttpAnswer:
    """Return the answer of a fault with its outcome, its wait and its `Retry-After`."""
    if fault.retry_after is not None:
        headers = {**answer.headers, "Retry-After": f"{fault.retry_after:g}"}
        answer = replace(answer, headers=headers)
    delay = answer.delay if fault.after is None else fault.after
    return replace(answer, outcome=str(fault.kind), delay=delay)


def too_long(tokens: int, window: int) -> str:
    """Return why a prompt of that many tokens is refused."""
    return (
        f"This model's maximum context length is {window} tokens. However, your messages resulted "
        f"in {tokens} tokens. Please reduce the length of the messages."
    )


def limit_headers(standings: Mapping[str, RateStanding], wait: float | None) -> dict[str, str]:
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


def _refused(fault: Fault) -> HttpAnswer:
    status, kind, code, message = _REFUSALS[fault.kind]
    return _error(str(fault.kind), status, kind, code, fault.message or message, None)


def _spoiled(fault: Fault, sound: HttpAnswer) -> HttpAnswer:
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


def _cut(fault: Fault, sound: HttpAnswer) -> HttpAnswer:
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


def _half(sound: HttpAnswer) -> HttpAnswer:
    if sound.length is None:
        pieces = sound.pieces[: len(sound.pieces) // 2]
    else:
        pieces = tuple(piece[: len(piece) // 2] for piece in sound.pieces)
    return replace(sound, pieces=pieces, usage=None)


def with_error(sound: HttpAnswer, last: bytes, body: Mapping[str, Any]) -> HttpAnswer:
    """Return a stream that ends in its middle with the event `last`, or a whole answer `body`."""
    if sound.length is None:
        half = _half(sound)
        return replace(half, pieces=(*half.pieces, last))
    data = exact_json.dumps(body)
    return replace(sound, pieces=(data,), length=len(data), usage=None)


def _body(sound: HttpAnswer, body: bytes, *, done: bool = True) -> HttpAnswer:
    if sound.content_type == EVENTS:
        pieces = (b"data: " + body + b"\n\n", *((DONE,) if done else ()))
        return replace(sound, pieces=pieces, usage=None)
    return replace(sound, pieces=(body,), length=len(body), usage=None)


def _without_message(choices: list[dict[str, object]]) -> bytes:
    payload = {"id": "chatcmpl-empty", "object": "chat.completion", "choices": choices}
    return event(payload).removeprefix(b"data: ").strip()


def _error(
    outcome: str, status: HTTPStatus, kind: str, code: str | None, message: str, param: str | None
) -> HttpAnswer:
    error = {"message": message, "type": kind, "param": param, "code": code}
    body = exact_json.dumps({"error": error})
    delay = 0.0 if outcome == REFUSED else None
    return HttpAnswer(outcome, status, (body,), length=len(body), delay=delay)
