"""Notes of a memory: an append-only list that readers follow from a place.

Knows nothing of searching: memories build their indexes from the notes that they read here.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

from stepfleet.orchestrator.memory.pruning import text_tokens

START = ""
AT_ONCE = 20
"""So many notes are indexed without a thread."""

T = TypeVar("T")
Take = Callable[[Sequence[str]], None]


@dataclass(frozen=True, slots=True)
class NotesPage:
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

    async def after(self, place: str) -> NotesPage:
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

    async def after(self, place: str) -> NotesPage:
        """Return the notes behind `place`."""
        generation, _, number = place.partition(":")
        anew = place != START and generation != str(self._generation)
        start = int(number or 0) if not anew else 0
        notes = tuple(self._notes[start:])
        return NotesPage(notes, f"{self._generation}:{start + len(notes)}", anew)

    async def clear(self) -> None:
        """Remove all notes."""
        self._notes.clear()
        self._generation += 1


class OnePerLoop(Generic[T]):
    """Makes an object at its first use in a loop and returns the same one from then on."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: WeakKeyDictionary[asyncio.AbstractEventLoop, T] = WeakKeyDictionary()

    def get(self) -> T:
        """Return this loop's object."""
        loop = asyncio.get_running_loop()
        found = self._made.get(loop)
        if found is None:
            found = self._made[loop] = self._make()
        return found

    async def close(self, close: Callable[[T], Awaitable[None]]) -> None:
        """Close this loop's object, if it has one."""
        found = self._made.pop(asyncio.get_running_loop(), None)
        if found is not None:
            await close(found)


class IndexSync:
    """Reads what is new in `notes` and hands it to `take`, once each; `forget` comes before all.

    For the coroutines of one event loop.
    """

    def __init__(self, notes: Notes, take: Take, forget: Callable[[], None]) -> None:
        self._notes = notes
        self._take = take
        self._forget = forget
        self._place = START
        self._locks: OnePerLoop[asyncio.Lock] = OnePerLoop(asyncio.Lock)

    @asynccontextmanager
    async def current(self) -> AsyncIterator[None]:
        """Hold the index still, with every note in it that is there by now."""
        async with self._locks.get():
            await self._catch_up()
            yield

    async def _catch_up(self) -> None:
        while True:
            page = await self._notes.after(self._place)
            if page.anew:
                self._forget()
            if not page.notes:
                self._place = page.place
                return
            if len(page.notes) <= AT_ONCE:
                self._take(page.notes)
            else:  # the event loop has other steps to do meanwhile
                await asyncio.to_thread(self._take, page.notes)
            self._place = page.place


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
