"""Reads ended runs from Redis as the archive gets them: short ones together, long ones alone."""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from stepfleet.orchestrator.archive.segments import RunCopy
from stepfleet.orchestrator.errors import SerializationError
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store.codec import Fields
from stepfleet.orchestrator.store.compression import unpacked
from stepfleet.orchestrator.store.keys import Keys

log = logging.getLogger(__name__)
READ_BYTES = 1024 * 1024
"""Bytes of runs, in Redis, that are read together, unless one has more; in JSON they are several
times as many."""
EVENTS = 500
_HASHES = ("", ":log", ":journal", ":outcomes", ":lost")
_KEYS = (*_HASHES, ":events")
"""The ends of a run's keys, in the order in which the script archive tells their sizes."""


@dataclass(frozen=True, slots=True)
class CopiedRun:
    """A run, the list that it is in, and by what a script tells that it is still the same.

    `size` is about how long its line is, `created` in ms.
    """

    copy: RunCopy
    listed: str
    state: str
    size: int
    created: int
    config: str


class RunLook(NamedTuple):
    """A run that can go, what tells that it is still the same, and the bytes of its keys."""

    run_id: str
    state: str
    sizes: Sequence[int]

    @property
    def keys(self) -> list[str]:
        """The ends of the keys that are there."""
        return [part for part, size in zip(_KEYS, self.sizes, strict=True) if size]


_Stored = tuple[str, dict[str, Fields], list[tuple[str, Fields]]]
"""A run's id, its hashes by the ends of their keys, and its events."""


class RunCopying:
    """Copies runs of one store."""

    def __init__(self, connection: Connection, names: Keys) -> None:
        self._connection, self._keys = connection, names

    async def copies(self, looks: Sequence[RunLook]) -> tuple[list[CopiedRun], list[str]]:
        """Return copies of runs, and the ids of those that cannot be copied."""
        read = await self.read(looks)
        given = [(*one, look.state) for one, look in zip(read, looks, strict=True) if one[1][""]]
        copies = await asyncio.to_thread(lambda: [_tried(*one) for one in given])
        stay = [one[0] for one, copy in zip(given, copies, strict=True) if copy is None]
        return [one for one in copies if one is not None], stay

    async def read(self, looks: Sequence[RunLook]) -> list[_Stored]:
        """Return runs' hashes and events, read together but for the events of long runs."""
        reads = [(one.run_id, part) for one in looks for part in one.keys]
        found = await self._connection.execute_all(
            *(_read_call(f"{self._keys.run(run_id)}{part}") for run_id, part in reads)
        )
        every = dict(zip(reads, found, strict=True))
        stored: list[_Stored] = []
        for run_id, _, _ in looks:
            hashes = {part: every.get((run_id, part), {}) for part in _HASHES}
            page = every.get((run_id, ":events"), [])
            events = await self._events(f"{self._keys.run(run_id)}:events", page)
            stored.append((run_id, hashes, events))
        return stored

    async def _events(self, key: str, page: list[tuple[str, Fields]]) -> list[tuple[str, Fields]]:
        """Return the events of a run, of which `page` are the first."""
        found = list(page)
        while len(page) == EVENTS:
            given = (f"({page[-1][0]}", "+", "COUNT", EVENTS)
            page = await self._connection.execute("XRANGE", key, *given)
            found += page
        return found


def within(most: int, looks: Iterable[RunLook]) -> Iterator[list[RunLook]]:
    """Yield runs in parts of so many bytes at most, unless one run has more."""
    part, size = list[RunLook](), 0
    for one in looks:
        if part and size + sum(one.sizes) > most:
            yield part
            part, size = [], 0
        part.append(one)
        size += sum(one.sizes)
    if part:
        yield part


def _read_call(key: str) -> tuple[Any, ...]:
    if key.endswith(":events"):
        return ("XRANGE", key, "-", "+", "COUNT", EVENTS)
    return ("HGETALL", key)


def _tried(
    run_id: str, hashes: dict[str, Fields], events: list[tuple[str, Fields]], state: str
) -> CopiedRun | None:
    """Return a run as `_copied` does; None, and an entry in the log, for one that stays."""
    try:
        return _copied(run_id, hashes, events, state)
    except Exception:
        log.exception("run %s cannot be archived, and stays", run_id)
        return None


def _copied(
    run_id: str, hashes: dict[str, Fields], events: list[tuple[str, Fields]], state: str
) -> CopiedRun:
    """Return a run as the archive gets it: records are plain JSON there, for other readers too."""
    header, logged, outcomes = hashes[""], hashes[":log"], hashes[":outcomes"]
    hashes = {
        **hashes,
        "": {**header, **_plain(header, ("slim", "outcome"))},
        ":log": {**logged, **_plain(logged, filter(str.isdigit, logged))},
        ":outcomes": _plain(outcomes, outcomes),
    }
    copy = RunCopy(run_id, {part: one for part, one in hashes.items() if one}, events)
    listed = header.get("stop_reason") or header["status"]
    parts = (*copy.hashes.values(), *(fields for _, fields in events))
    size = sum(len(one) for part in parts for one in part.values())
    return CopiedRun(copy, listed, state, size, int(header["created"]), header["config"])


def _plain(fields: Fields, names: Iterable[str]) -> Fields:
    """Return these fields unpacked; those that this version cannot read stay as they are."""
    found = {}
    for name in names:
        if name in fields:
            found[name] = fields[name]
            with suppress(SerializationError):
                found[name] = unpacked(fields[name]).decode()
    return found
