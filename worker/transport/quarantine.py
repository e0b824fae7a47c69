"""Keeps messages that must not reach Celery, for people to look at.

An entry is one line of JSON (``at`` in seconds since the epoch, ``reason``, ``queue``, ``bytes``),
a newline, and the first ``KEPT_BYTES`` of the message as they are. ``fetch.lua`` writes the same.
"""

import time
from typing import Any

import orjson

QUARANTINE = "sf:quarantine"
KEPT_ENTRIES = 1000
KEPT_BYTES = 4096


def entry(raw: bytes, reason: str, queue: str, at: float | None = None) -> bytes:
    """Make the entry of a refused message."""
    about = {
        "at": time.time() if at is None else at,
        "reason": reason,
        "queue": queue,
        "bytes": len(raw),
    }
    return orjson.dumps(about) + b"\n" + raw[:KEPT_BYTES]


def read_entry(stored: bytes) -> tuple[dict[str, Any], bytes]:
    """Return what is known of a refused message, and its first bytes."""
    about, _, payload = stored.partition(b"\n")
    return orjson.loads(about), payload
