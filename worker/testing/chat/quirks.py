"""Decides how a sound answer is put down by servers that are compatible but for a detail. Pure."""

import re
from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Any

import orjson

_DONE = b"data: [DONE]"
_ESCAPE = re.compile(rb"\\.")
_CONTROL = {rb"\n": b"\n", rb"\t": b"\t"}


class Quirk(StrEnum):
    """How the form of an answer departs from OpenAI's own."""

    REPEATED_NAMES = "repeated_names"
    """Each piece of a streamed call has its id and whole name again."""
    NO_INDEX = "no_index"
    """Pieces of streamed calls have no index."""
    SHARED_INDEX = "shared_index"
    """All streamed calls have the index 0."""
    ARGUMENTS_OBJECT = "arguments_object"
    """Arguments are an object instead of text, and come in one piece."""
    NO_FINISH_REASON = "no_finish_reason"
    """There is no finish reason."""
    CONTENT_PARTS = "content_parts"
    """Text comes as a list of parts."""
    RAW_CONTROL = "raw_control"
    """Line breaks and tabs in texts are not escaped."""
    NULLS = "nulls"
    """What a piece does not have is there as null."""
    NO_ROLE = "no_role"
    """No piece names a role."""
    COMMENTS = "comments"
    """Comments keep the stream alive between its events."""
    CRLF = "crlf"
    """The stream's lines end with CR LF."""
    NO_SPACE = "no_space"
    """No space stands behind `data:`."""


def quirky_body(body: bytes, quirks: Collection[Quirk]) -> bytes:
    """Return a whole answer with those of the quirks that one can have."""
    payload = orjson.loads(body)
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
            payload = orjson.loads(data)
            for choice in payload["choices"]:
                _change(choice, choice["delta"], quirks)
                _cut(choice["delta"], names, quirks)
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
            call["function"]["arguments"] = orjson.loads(text) if text else None
    if Quirk.NULLS in quirks:
        for name in ("content", "tool_calls", "refusal", "function_call"):
            message.setdefault(name, None)


def _cut(
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
    data = orjson.dumps(payload)
    if Quirk.RAW_CONTROL in quirks:
        data = _ESCAPE.sub(lambda one: _CONTROL.get(one[0], one[0]), data)
    return data


def _line(data: bytes, quirks: Collection[Quirk]) -> bytes:
    end = b"\r\n" if Quirk.CRLF in quirks else b"\n"
    field = b"data:" if Quirk.NO_SPACE in quirks else b"data: "
    comment = b": keep-alive" + end + end if Quirk.COMMENTS in quirks else b""
    return comment + field + data + end + end
