"""kombu's JSON, read and written by orjson where that gives the same.

A task's body is decoded twice on its way through Celery, and every batch of task events encoded
twice: with the standard library a good part of a step's cost. What orjson reads in another
way (kombu's typed values, NaN, numbers beyond 64 bits) is left to kombu's own. Events are written
by orjson, which makes null of NaN and plain text of a UUID. Must not know messages.
"""

import re
from typing import Any

import orjson

from stepfleet.worker.engine.transport.kombu_types import (
    add_serializer,
)
from stepfleet.worker.engine.transport.kombu_types import (
    dumps as kombu_dumps,
)
from stepfleet.worker.engine.transport.kombu_types import (
    loads as kombu_loads,
)

EVENTS = "stepfleet-events"
"""The serializer of task events: JSON, as its content type says."""

TYPED_JSON = b'"__type__"'  # kombu writes datetimes, UUIDs and decimals as objects with this key

LONG_NUMBER = re.compile(rb"[0-9]{19}")
"""What may be a number beyond 64 bits, of which orjson makes a float."""


def decode(raw: bytes | bytearray | memoryview | str) -> Any:
    """Return what kombu's decoder returns; raises what it raises."""
    data = raw.encode("utf-8", "surrogatepass") if isinstance(raw, str) else bytes(raw)
    if TYPED_JSON not in data and not LONG_NUMBER.search(data):
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError:
            pass
    return kombu_loads(raw)


def encode_plain(value: Any) -> str:
    """Return plain values as JSON; what orjson cannot write, kombu does."""
    try:
        return orjson.dumps(value, default=_not_plain, option=_STRICT).decode()
    except TypeError:
        return str(kombu_dumps(value))


def register_events() -> None:
    """Let kombu decode JSON by `decode`, and know `EVENTS`; repeating it is harmless."""
    add_serializer(
        EVENTS,
        encode_plain,
        decode,
        content_type="application/json",
        content_encoding="utf-8",
    )


_STRICT = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME


def _not_plain(value: Any) -> Any:
    raise TypeError(type(value).__name__)
