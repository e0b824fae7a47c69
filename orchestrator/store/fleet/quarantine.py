"""Keeps refused broker messages for people to look at.

An entry is one line of JSON (``at`` in seconds since the epoch, ``reason``, ``queue``, ``bytes``),
a newline, and the first ``KEPT_BYTES`` of the message as they are. The worker's ``fetch.lua``
writes the same. Must not know the reasons for a refusal.
"""

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import orjson

from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store.keys import NO_PREFIX, QUARANTINE, Keys
from stepfleet.orchestrator.store.lua import run_script

KEPT_ENTRIES = 1000
KEPT_BYTES = 4096

_SHOWN = 300


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
    """Return the facts of a refused message, and its first bytes."""
    about, _, payload = stored.partition(b"\n")
    return orjson.loads(about), payload


async def keep_aside(connection: Connection, made: bytes, keys: Keys = NO_PREFIX) -> None:
    """Add an entry, once; the oldest ones make room. Raises `StoreError`."""
    await run_script(connection, "aside", [keys.of(QUARANTINE)], made, KEPT_ENTRIES)


def about_entries(stored: Iterable[str]) -> list[dict[str, Any]]:
    """Return the facts of refused messages, without their contents."""
    return [_about(one) for one in stored]


def reasons(about: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Return why messages were refused and how often, the most frequent reason first."""
    return dict(Counter(str(one["reason"]) for one in about).most_common())


def _about(stored: str) -> dict[str, Any]:
    try:
        facts = orjson.loads(stored.partition("\n")[0])
        return {
            "at": float(facts["at"]),
            "reason": str(facts["reason"])[:_SHOWN],
            "queue": str(facts["queue"])[:_SHOWN],
            "bytes": int(facts["bytes"]),
        }
    except (ValueError, TypeError, LookupError):  # an entry may hold anything
        return {"at": 0.0, "reason": "the entry cannot be read", "queue": "", "bytes": len(stored)}
