"""Amazon Bedrock's Converse API: what its answers and event frames mean."""

import base64
import struct
import zlib
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from typing import Any

import orjson

from stepfleet.orchestrator.models.endpoint import ROUTES, Endpoint
from stepfleet.orchestrator.models.failures import stated_failure
from stepfleet.orchestrator.models.pricing.prices import tier_of
from stepfleet.orchestrator.models.services import Api
from stepfleet.orchestrator.records.conversation.messages import Block
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest
from stepfleet.orchestrator.records.steps import FinishReason
from stepfleet.orchestrator.records.usage import UsageStats
from stepfleet.orchestrator.tools import parse_tool_calls
from stepfleet.worker.attempt.sanitize import new_call_id
from stepfleet.worker.models.bedrock.request import provider_of, request_body
from stepfleet.worker.models.bodies import (
    MOST_BLOCKS,
    MOST_REASONING,
    blocked,
    encode,
    malformed,
    parse_body,
    parse_event,
    reasoning_block,
    shown_reasoning,
    usage_apart,
    word,
)
from stepfleet.worker.models.http_model import Format

MOST_BYTES = 16 * 1024 * 1024
"""Longest frame that is read, in bytes."""
_MOST_HEADERS = 128 * 1024
_PRELUDE, _CRC = 12, 4
_STRING = 7
_SIZES = {0: 0, 1: 0, 2: 1, 3: 2, 4: 4, 5: 8, 8: 8, 9: 16}
"""Bytes of a header's value by its type; 6 and 7 state their own length."""


class FrameCutter:
    """Cuts a byte stream into events: JSON objects with the event's kind as their only key.

    An exception is `{"exception": {"type": ..., "body": ...}}`.
    """

    def __init__(self) -> None:
        self._begun = bytearray()

    @staticmethod
    def fits(begin: bytes) -> bool:
        """Return whether a body that begins so is such a stream: a frame has at most 16 MiB."""
        return begin[:1] == b"\0"

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take the next bytes and return every event that they complete.

        Raises `ModelError` for a broken or too long frame.
        """
        self._begun += chunk
        return list(self._events())

    def end(self) -> list[bytes]:
        """Return nothing: a frame that the stream's end cuts off does not count."""
        return []

    def _events(self) -> Iterator[bytes]:
        while len(self._begun) >= _PRELUDE:
            size, headers, crc = struct.unpack_from("!III", self._begun)
            if crc != zlib.crc32(self._begun[: _PRELUDE - _CRC]):
                raise malformed("the checksum of a frame's length is wrong")
            if size > MOST_BYTES or headers > min(_MOST_HEADERS, size - _PRELUDE - _CRC):
                raise malformed(f"a frame of {size} B has {headers} B of headers")
            if len(self._begun) < size:
                return
            frame = bytes(self._begun[:size])
            del self._begun[:size]
            if zlib.crc32(frame[:-_CRC]) != int.from_bytes(frame[-_CRC:]):
                raise malformed("a frame's checksum is wrong")
            start = _PRELUDE + headers
            yield _event(_headers(frame[_PRELUDE:start]), frame[start:-_CRC])


def _event(headers: dict[str, str], payload: bytes) -> bytes:
    match headers.get(":message-type"):
        case "event":
            return b"{%s:%s}" % (orjson.dumps(headers.get(":event-type", "")), payload or b"{}")
        case "exception":
            kind = orjson.dumps(headers.get(":exception-type", ""))
            return b'{"exception":{"type":%s,"body":%s}}' % (kind, payload or b"{}")
    text = headers.get(":error-message", "an error without a message")
    error = {"type": headers.get(":error-code", "error"), "body": {"message": text}}
    return orjson.dumps({"exception": error})


def _headers(data: bytes) -> dict[str, str]:
    """Return the headers whose values are text."""
    found: dict[str, str] = {}
    at = 0
    try:
        while at < len(data):
            named = at + 1 + data[at]
            name, kind = data[at + 1 : named].decode(), data[named]
            at = named + 1
            if kind in _SIZES:
                at += _SIZES[kind]
                continue
            (size,) = struct.unpack_from("!H", data, at)
            at += 2 + size
            if kind == _STRING:
                found[name] = data[at - size : at].decode()
    except (IndexError, struct.error, UnicodeDecodeError):
        raise malformed("a frame's headers cannot be read") from None
    if at != len(data):
        raise malformed("a frame's headers cannot be read")
    return found


_REASONS = {
    "end_turn": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "tool_use": FinishReason.TOOL_CALLS,
    "max_tokens": FinishReason.LENGTH,
    "model_context_window_exceeded": FinishReason.LENGTH,
    "guardrail_intervened": FinishReason.CONTENT_FILTER,
    "content_filtered": FinishReason.CONTENT_FILTER,
}
_UNREAD = {
    "image": "an image",
    "audio": "audio",
    "video": "a video",
    "document": "a document",
}
_MISTAKES = {"malformed_model_output", "malformed_tool_use"}
"""Stop reasons of answers that the service could not read itself."""
_STATUSES = {
    "throttlingException": HTTPStatus.TOO_MANY_REQUESTS,
    "validationException": HTTPStatus.BAD_REQUEST,
    "serviceUnavailableException": HTTPStatus.SERVICE_UNAVAILABLE,
    "modelTimeoutException": HTTPStatus.REQUEST_TIMEOUT,
    "internalServerException": HTTPStatus.INTERNAL_SERVER_ERROR,
    "modelStreamErrorException": HTTPStatus.FAILED_DEPENDENCY,
}
"""The status that an exception in a stream would have had before it."""


def parse_converse(payload: dict[str, Any], default_model: str) -> LLMResponse:
    """Return an answer as the fleet's; the service does not name the model that answered."""
    texts: list[str] = []
    uses: list[dict[str, Any]] = []
    reasoning: list[Block] = []
    thoughts: list[str] = []
    says = False  # a text that is sent back: the service takes none that is blank
    for block in _content(payload):
        if "toolUse" in block:
            used = block["toolUse"] if isinstance(block["toolUse"], dict) else {}
            uses.append({**used, "id": used.get("toolUseId"), "arguments": used.get("input")})
        elif isinstance(thought := block.get("reasoningContent"), dict):
            known = thought.get("reasoningText")
            signed = known if isinstance(known, dict) else {}
            thoughts.append(word(signed.get("text")))
            is_known_again = signed.get("signature") or "redactedContent" in thought
            # Models refuse to get back what is neither signed nor encrypted.
            if is_known_again and len(reasoning) < MOST_REASONING:
                at = says + len(uses)
                reasoning.append(reasoning_block(provider_of(default_model), at, block))
        else:
            said = _texts(block)
            texts += said
            says = says or any(map(str.strip, said))
    calls = parse_tool_calls(uses, new_id=new_call_id)
    reason = word(payload.get("stopReason"))
    if reason in _MISTAKES and not calls:
        raise malformed(f"it ended with {reason}")
    tier = payload.get("serviceTier")
    finish = _REASONS.get(reason, FinishReason.OTHER)
    if finish is FinishReason.CONTENT_FILTER and not says:
        raise blocked(f"stopReason {reason}")
    if calls and (finish is FinishReason.STOP or not reason):
        finish = FinishReason.TOOL_CALLS
    return LLMResponse.model_construct(
        content="".join(texts),
        tool_calls=calls or None,
        usage=usage_of(payload.get("usage")),
        model=default_model,
        service_tier=tier_of(tier.get("type") if isinstance(tier, dict) else tier),
        finish_reason=finish,
        reasoning=tuple(reasoning),
        reasoning_text=shown_reasoning(thoughts),
        raw=payload,
        unread=next(
            (_UNREAD[one] for block in _content(payload) for one in _UNREAD.keys() & block), ""
        ),
    )


def _texts(block: dict[str, Any]) -> list[str]:
    """Return the texts of a block, cited or not."""
    cited = block.get("citationsContent")
    parts = cited.get("content") if isinstance(cited, dict) else [block]
    found = parts if isinstance(parts, list) else []
    return [word(one.get("text")) for one in found if isinstance(one, dict)]


def _content(payload: dict[str, Any]) -> list[dict[str, Any]]:
    output = payload.get("output")
    message = output.get("message") if isinstance(output, dict) else None
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list) or not all(isinstance(one, dict) for one in content):
        raise malformed("its content is not a list of blocks")
    return content


def usage_of(usage: Any) -> UsageStats | None:
    """Return the token counts of one call, or None when they are absent or no counts."""
    if not isinstance(usage, dict):
        return None
    return usage_apart(
        usage.get("inputTokens"),
        usage.get("outputTokens"),
        cached=usage.get("cacheReadInputTokens"),
        written=usage.get("cacheWriteInputTokens"),
        for_hour=_for_hour(usage.get("cacheDetails")),
    )


def _for_hour(details: Any) -> Any:
    """Return how many tokens were written to the cache for an hour; there is one entry a time."""
    found = (one for one in details if isinstance(one, dict)) if isinstance(details, list) else ()
    return next((one.get("inputTokens") for one in found if one.get("ttl") == "1h"), None)


class StreamedConverse:
    """The answer so far. `error` is the payload of a failure that came as an event."""

    def __init__(self) -> None:
        self.error: dict[str, Any] | None = None
        self.usage: dict[str, Any] | None = None
        self._size = 0
        self._done = False
        self._reason: Any = None
        self._tier: Any = None
        self._starts: dict[int, dict[str, Any]] = {}
        self._pieces: dict[int, dict[str, list[str]]] = {}

    @property
    def size(self) -> int:
        """How many characters of text and calls it has."""
        return self._size

    @property
    def is_over(self) -> bool:
        """Whether nothing of interest follows: the usage comes after the stop reason."""
        return self._done or self.error is not None

    @property
    def finished(self) -> bool:
        """Whether its own finish reason has come: then it is whole, whatever else may follow."""
        return self._reason is not None

    def add(self, data: bytes) -> str:
        """Add one event and return the piece of text in it. Raises `ModelError` if malformed."""
        event = parse_event(data)
        kind, body = next(iter(event.items()), ("", {}))
        if not isinstance(body, dict):
            raise malformed("an event of the stream lacks its object")
        match kind:
            case "contentBlockStart":
                self._start(body.get("contentBlockIndex"), body.get("start"))
            case "contentBlockDelta":
                return self._delta(body.get("contentBlockIndex"), body.get("delta"))
            case "messageStop":
                self._reason = body.get("stopReason") or self._reason
            case "metadata":
                self.usage, self._tier = body.get("usage"), body.get("serviceTier")
                self._done = True
            case "exception":
                self.error = _error_of(body)
        return ""

    def payload(self) -> dict[str, Any]:
        """Return the whole answer. Raises `ModelError` when the stream broke off."""
        if self._reason is None:
            raise malformed("the stream broke off")
        content = [self._whole(index) for index in sorted(self._pieces)]
        message = {"role": "assistant", "content": content}
        ended = {"stopReason": self._reason, "usage": self.usage, "serviceTier": self._tier}
        return {"output": {"message": message}, **ended}

    def _start(self, index: Any, start: Any) -> None:
        # Texts may have one that says nothing; a call's has its name.
        given = start if isinstance(start, dict) else {}
        self._keep_media(index, given)
        used = given.get("toolUse")
        if isinstance(index, int) and self._has_room(index) and isinstance(used, dict):
            self._starts[index] = used
            self._pieces.setdefault(index, {})

    def _delta(self, index: Any, delta: Any) -> str:
        # Texts have no start: their first piece begins them.
        if not isinstance(index, int) or not isinstance(delta, dict) or not self._has_room(index):
            return ""
        self._keep_media(index, delta)
        text = delta.get("text")
        used, thought = delta.get("toolUse"), delta.get("reasoningContent")
        if isinstance(used, dict):
            self._add(index, "input", used.get("input"))
        elif isinstance(thought, dict):
            for field in ("text", "signature", "redactedContent"):
                self._add(index, f"thought {field}", thought.get(field))
        elif isinstance(text, str):
            self._add(index, "text", text)
            return text
        return ""

    def _keep_media(self, index: Any, given: dict[str, Any]) -> None:
        # That there is one is all that is told.
        if isinstance(index, int) and self._has_room(index):
            for kind in _UNREAD.keys() & given:
                self._pieces.setdefault(index, {}).setdefault(kind, [])

    def _add(self, index: int, field: str, piece: Any) -> None:
        if isinstance(piece, str):
            self._pieces.setdefault(index, {}).setdefault(field, []).append(piece)
            self._size += len(piece) if field in ("text", "input", "thought text") else 0

    def _has_room(self, index: int) -> bool:
        return index in self._pieces or len(self._pieces) < MOST_BLOCKS

    def _whole(self, index: int) -> dict[str, Any]:
        pieces = self._pieces[index]
        if index in self._starts or "input" in pieces:
            # No piece is a call without arguments; no start is one without a name.
            used = self._starts.get(index, {})
            return {"toolUse": {**used, "input": "".join(pieces.get("input", ()))}}
        if "thought redactedContent" in pieces:
            joined = _joined(pieces["thought redactedContent"])
            return {"reasoningContent": {"redactedContent": joined}}
        if "thought text" in pieces or "thought signature" in pieces:
            thought = {"text": "".join(pieces.get("thought text", ()))}
            if signature := "".join(pieces.get("thought signature", ())):
                thought["signature"] = signature
            return {"reasoningContent": {"reasoningText": thought}}
        media: dict[str, Any] = {kind: {} for kind in _UNREAD.keys() & pieces}
        return {"text": "".join(pieces.get("text", ())), **media}


def _joined(pieces: list[str]) -> str:
    """Return the base64 of data whose pieces came in base64."""
    if len(pieces) == 1:
        return pieces[0]
    try:
        return base64.b64encode(b"".join(map(base64.b64decode, pieces))).decode()
    except ValueError:
        raise malformed("encrypted reasoning is not in base64") from None


def _error_of(exception: dict[str, Any]) -> dict[str, Any]:
    kind, body = exception.get("type"), exception.get("body")
    body = body if isinstance(body, dict) else {}
    message = body.get("originalMessage") or body.get("message") or body.get("Message") or kind
    status = _STATUSES.get(word(kind))
    return {"error": {"type": kind, "message": message, **({"code": status} if status else {})}}


def _body(request: ModelRequest, _: Endpoint) -> bytes:
    return encode(request_body(request))


CONVERSE = Format(
    route=ROUTES[Api.CONVERSE],
    body=_body,
    parse=parse_body,
    stream=StreamedConverse,
    usage=usage_of,
    response=parse_converse,
    failure=partial(stated_failure, answer="output"),
    stream_type="application/vnd.amazon.eventstream",
    cutter=FrameCutter,
)
