"""Decides whether a message from the broker is one that Celery can be given.

A message that is not a JSON object, nests too deeply, is compressed or has fields of the wrong type
ends a stock worker, or makes it reconnect for ever. Pure: raw bytes in, the message or the reason
for its refusal out. Must not know where messages come from or what is done with refused ones.
"""

import base64
import binascii
from collections.abc import Callable
from typing import Any

import orjson

from stepfleet.worker.engine.transport.fast_json import LONG_NUMBER, TYPED_JSON
from stepfleet.worker.engine.transport.kombu_types import loads as kombu_loads

MESSAGE_LIMIT = 4 * 1024 * 1024
"""Largest message in bytes, as it lies in the broker."""

BROADCAST_LIMIT = 1024 * 1024
"""Largest broadcast message in bytes: remote control and events."""

LONGEST_HEADER = 4096
"""Characters of a text in the headers: Celery logs some, and sends others to every monitor."""

DECODED = "decoded"
"""Field of an examined message: its body as kombu decodes it, or None where that is unknown."""

_JSON = "application/json"
_SMALL = 8192
_OPTIONS = frozenset({"callbacks", "errbacks", "chain", "chord"})
_NOT_JSON = (ValueError, TypeError, RecursionError, LookupError, AttributeError, ArithmeticError)


class MessageRefused(ValueError):  # noqa: N818 a verdict
    """The message must not reach Celery; the text is the reason."""


def examine(raw: bytes) -> dict[str, Any]:
    """Return the decoded message; raises ``MessageRefused`` with the reason."""
    message = _decoded(raw, "message")
    headers = _headers_of(message)
    properties = _field(message, "properties", dict)
    _field(properties, "delivery_info", dict, {})
    _field(message, "content-encoding", str, "")
    _check_content(message, headers)
    if len(raw) > _SMALL:
        _examine_texts(headers)
    body = _body(message.get("body"), properties.get("body_encoding"))
    content = _decoded(body, "body")
    if "task" in headers:
        _examine_task(headers, content)
    else:
        _examine_other(content)
    if body:
        message["body"] = body
        properties.pop("body_encoding", None)
    message[DECODED] = None if LONG_NUMBER.search(body) else content
    return message  # type: ignore[no-any-return]


def examine_broadcast(message: Any) -> None:
    """Check a decoded message of remote control or events. Raises `MessageRefused`."""
    _check_content(message, _headers_of(message))
    message.pop(DECODED, None)  # its sender's


def _headers_of(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise MessageRefused(f"the message is a JSON {type(message).__name__}, not an object")
    headers: dict[str, Any] = _field(message, "headers", dict, {})
    return headers


def _check_content(message: Any, headers: dict[str, Any]) -> None:
    if (kind := message.get("content-type")) != _JSON:
        raise MessageRefused(f"the content is {kind!r}, and only {_JSON} is taken"[:300])
    if headers.get("compression"):
        raise MessageRefused("the body is compressed, which is refused: it may be of any size")


def _decoded(raw: bytes, what: str) -> Any:
    decode: Callable[[bytes], Any] = kombu_loads if TYPED_JSON in raw else orjson.loads
    try:
        try:
            return decode(raw)
        except _NOT_JSON:
            if decode is kombu_loads or not (b"NaN" in raw or b"Infinity" in raw):
                raise
        return kombu_loads(raw)
    except _NOT_JSON as error:
        raise MessageRefused(f"the {what} cannot be decoded: {error}"[:300]) from None


def _field(record: dict[str, Any], name: str, kind: type, default: Any = None) -> Any:
    value = record.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, kind):
        raise MessageRefused(f"{name} is {type(value).__name__}, not {kind.__name__}")
    return value


def _body(body: object, encoding: object) -> bytes:
    if body is None:
        return b""
    if not isinstance(body, str):
        raise MessageRefused(f"body is {type(body).__name__}, not str")
    if not encoding or str(encoding).lower() == "utf-8":
        return body.encode(errors="replace")
    if encoding != "base64":
        raise MessageRefused(f"body_encoding is {encoding!r}, not base64"[:100])
    try:
        return base64.b64decode(body)
    except (binascii.Error, ValueError) as error:
        raise MessageRefused(f"the body is not valid base64: {error}"[:300]) from None


def _examine_texts(headers: dict[str, Any]) -> None:
    for name, value in headers.items():
        if isinstance(value, str) and len(value) > LONGEST_HEADER:
            raise MessageRefused(f"header {name[:50]!r} is longer than {LONGEST_HEADER} characters")


def _examine_task(headers: dict[str, Any], content: object) -> None:
    for name in ("task", "id"):
        _field(headers, name, str)
    for name in ("root_id", "parent_id", "eta", "expires", "shadow", "group"):
        _field(headers, name, str, "")
    _field(headers, "retries", int, 0)
    limits = _field(headers, "timelimit", list, [None, None])
    if len(limits) != 2 or not all(isinstance(x, (int, float, type(None))) for x in limits):  # noqa: PLR2004 hard and soft
        raise MessageRefused("timelimit is not [hard, soft], in seconds or null")
    _examine_arguments(content)


def _examine_other(content: object) -> None:
    """Check a message that is not a task, as replies to remote control. An old task would run."""
    if isinstance(content, dict) and "task" in content:
        raise MessageRefused("the message is of Celery's task protocol 1; send it with protocol 2")


def _examine_arguments(body: object) -> None:
    if not isinstance(body, list) or len(body) != 3:  # noqa: PLR2004 protocol 2: args, kwargs, embed
        raise MessageRefused("the body is not [args, kwargs, options]")
    args, kwargs, options = body
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise MessageRefused("args of the body must be a list, and kwargs an object")
    if options is not None and not isinstance(options, dict):
        raise MessageRefused("options of the body must be an object")
    if options and not options.keys() <= _OPTIONS:
        raise MessageRefused("options of the body has fields that Celery does not know")
