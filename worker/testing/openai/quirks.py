"""Changes a sound answer as servers do that are compatible but for a detail. Pure."""

import re
from collections.abc import Collection, Sequence
from typing import Any

from stepfleet.orchestrator.records import exact_json
from stepfleet.worker.testing.scenario.replies import Quirk

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
            call["function"]["arguments"] = exact_json.loads(text) if text else None
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
    data = exact_json.dumps(payload)
    if Quirk.RAW_CONTROL in quirks:
        data = _ESCAPE.sub(lambda one: _CONTROL.get(one[0], one[0]), data)
    return data


def _line(data: bytes, quirks: Collection[Quirk]) -> bytes:
    end = b"\r\n" if Quirk.CRLF in quirks else b"\n"
    field = b"data:" if Quirk.NO_SPACE in quirks else b"data: "
    comment = b": keep-alive" + end + end if Quirk.COMMENTS in quirks else b""
    return comment + field + data + end + end
