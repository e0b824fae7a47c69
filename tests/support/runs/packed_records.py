"""Records of a store as JSON, for tests that look at what lies there."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import orjson

from stepfleet.orchestrator.errors import SerializationError
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store.codec import load_events
from stepfleet.orchestrator.store.compression import packed, unpacked


def plain(stored: str) -> str:
    """Return a stored record as JSON."""
    return unpacked(stored).decode()


def read(stored: str) -> Any:
    """Return what a stored record says."""
    return orjson.loads(unpacked(stored))


def plain_log(log: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of a run's log, its steps as JSON."""
    return {name: plain(value) if name.isdigit() else value for name, value in log.items()}


def hidden(found: Any) -> str:
    """Return the JSON of every packed record in a reply of Redis, as deep as it is."""
    match found:
        case bytes():
            return hidden(found.decode(errors="replace"))
        case str():
            with suppress(SerializationError):
                return plain(found)
            return ""
        case dict():
            return "\n".join(map(hidden, found.values()))
        case list() | tuple():
            return "\n".join(map(hidden, found))
        case _:
            return ""


def repacked(stored: str, **changes: Any) -> str:
    """Return a stored record with some of its fields changed."""
    return packed(orjson.dumps({**read(stored), **changes}).decode())


async def as_version_1(connection: Connection, key: str) -> None:
    """Rewrite the records of the run at `key` as the first version has written them: plain."""
    run_id = key.rpartition(":")[2]
    header = await connection.execute("HGETALL", key)
    fields = {name: plain(header[name]) for name in ("slim", "outcome") if name in header}
    await _set(connection, key, {**fields, "v": "1"})
    for part in ("log", "outcomes"):
        await _set(connection, f"{key}:{part}", plain_log(await _hash(connection, f"{key}:{part}")))
    stream = f"{key}:events"
    told = await connection.execute("XRANGE", stream, "-", "+")
    left = await connection.execute("TTL", stream)
    await connection.execute("DEL", stream)
    for entry, raw in told:
        one = dict(raw) if isinstance(raw, dict) else dict(zip(raw[::2], raw[1::2], strict=True))
        events = orjson.dumps(load_events(run_id, one["events"])).decode()
        await connection.execute("XADD", stream, entry, "first", one["first"], "events", events)
    if left > 0:
        await connection.execute("EXPIRE", stream, left)


async def _hash(connection: Connection, key: str) -> dict[str, str]:
    return dict(await connection.execute("HGETALL", key))


async def _set(connection: Connection, key: str, fields: Mapping[str, str]) -> None:
    if fields:
        await connection.execute("HSET", key, *(item for pair in fields.items() for item in pair))
