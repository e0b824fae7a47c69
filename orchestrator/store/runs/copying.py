"""Ended runs as the archive gets them. Pure."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from stepfleet.orchestrator.archive.segments import RunCopy
from stepfleet.orchestrator.errors import SerializationError
from stepfleet.orchestrator.store.codec import Fields
from stepfleet.orchestrator.store.compression import unpacked


@dataclass(frozen=True, slots=True)
class CopiedRun:
    """A run, the list that it is in, and by what a script tells that it is still the same."""

    copy: RunCopy
    listed: str
    state: str
    size: int


def copied_run(
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
    return CopiedRun(copy, listed, state, len(copy.line()))


def _plain(fields: Fields, names: Iterable[str]) -> Fields:
    """Return these fields unpacked; those that this version cannot read stay as they are."""
    found = {}
    for name in names:
        if name in fields:
            found[name] = fields[name]
            with suppress(SerializationError):
                found[name] = unpacked(fields[name]).decode()
    return found
