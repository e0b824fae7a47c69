"""Where notes are kept: an append-only list that readers follow from a place.

Knows nothing of searching: memories build their indexes from what they read here.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from stepfleet.orchestrator.memory.pruning import text_tokens

START = ""


@dataclass(frozen=True, slots=True)
class Page:
    """Notes behind a place, and the place behind them.

    `anew` is true where everything from before was cleared; then these are all notes from the
    start.
    """

    notes: tuple[str, ...]
    place: str
    anew: bool = False


class Notes(Protocol):
    """A store of notes. `START` is the place before the first."""

    async def append(self, note: str) -> None:
        """Put a note behind the others."""

    async def after(self, place: str) -> Page:
        """Return some notes behind `place`; none when there are no more."""

    async def clear(self) -> None:
        """Remove all notes."""


class InMemoryNotes:
    """Notes in this process."""

    def __init__(self) -> None:
        self._notes: list[str] = []
        self._generation = 0

    async def append(self, note: str) -> None:
        """Put a note behind the others."""
        self._notes.append(note)

    async def after(self, place: str) -> Page:
        """Return the notes behind `place`."""
        generation, _, number = place.partition(":")
        anew = place != START and generation != str(self._generation)
        start = int(number or 0) if not anew else 0
        notes = tuple(self._notes[start:])
        return Page(notes, f"{self._generation}:{start + len(notes)}", anew)

    async def clear(self) -> None:
        """Remove all notes."""
        self._notes.clear()
        self._generation += 1


def fitting(notes: Iterable[str], max_tokens: int) -> str:
    """Return the notes, the best first, as far as they fit into `max_tokens` tokens (estimated)."""
    room = max_tokens
    lines: list[str] = []
    for note in notes:
        line = f"- {note}"
        size = text_tokens(line) + 1
        if size <= room:
            lines.append(line)
            room -= size
    return "\n".join(lines)
