"""Notes of a memory: an append-only list that readers follow from a place.

Knows nothing of searching: memories build their indexes from the notes that they read here.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.memory.pruning import text_tokens
from stepfleet.orchestrator.redis_client.clients import client_of
from stepfleet.orchestrator.redis_client.urls import usable_url
from stepfleet.orchestrator.settings.settings import load_settings

PAGE = 1000


START = ""
AT_ONCE = 20
"""So many notes are indexed without a thread."""

T = TypeVar("T")
Take = Callable[[Sequence[str]], None]


@dataclass(frozen=True, slots=True)
class NotesPage:
    """Notes after a position, and the position after them.

    `cleared` is true where all earlier notes were cleared; then these begin at the start.
    """

    notes: tuple[str, ...]
    place: str
    cleared: bool = False


class Notes(Protocol):
    """A store of notes. `START` is the place before the first."""

    async def append(self, note: str) -> None:
        """Append a note."""

    async def after(self, place: str) -> NotesPage:
        """Return some notes after `place`; none at the end."""

    async def clear(self) -> None:
        """Remove all notes."""


class InMemoryNotes:
    """Notes in this process."""

    def __init__(self) -> None:
        self._notes: list[str] = []
        self._generation = 0

    async def append(self, note: str) -> None:
        """Append a note."""
        self._notes.append(note)

    async def after(self, place: str) -> NotesPage:
        """Return the notes after `place`."""
        generation, _, number = place.partition(":")
        cleared = place != START and generation != str(self._generation)
        start = int(number or 0) if not cleared else 0
        notes = tuple(self._notes[start:])
        return NotesPage(notes, f"{self._generation}:{start + len(notes)}", cleared)

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
    """Passes each new note of `notes` to `take` once; `forget` is called when they were cleared.

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
        """Bring the index up to date and lock it for the block."""
        async with self._locks.get():
            await self._catch_up()
            yield

    async def _catch_up(self) -> None:
        while True:
            page = await self._notes.after(self._place)
            if page.cleared:
                self._forget()
            if not page.notes:
                self._place = page.place
                return
            if len(page.notes) <= AT_ONCE:
                self._take(page.notes)
            else:  # other steps use the event loop meanwhile
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


class RedisNotes:
    """Notes under `name` in the Redis at `url`; the newest `most` of them are kept.

    Belongs to no run and never expires. Connects at its first use in an event loop; nothing is
    sent before. `prefix` begins the keys (default: `STEPFLEET_PREFIX`). Raises
    `ConfigurationError` for an unusable URL.
    """

    def __init__(
        self, url: str, name: str = "notes", *, most: int = 10_000, prefix: str | None = None
    ) -> None:
        try:
            address = usable_url(url)
        except ValueError as error:
            raise ConfigurationError(f"the URL of RedisNotes: {error}") from None
        self._name = name
        self._prefix = prefix
        self._most = most
        self._clients: OnePerLoop[Any] = OnePerLoop(
            lambda: client_of(address, decode_responses=True)
        )

    @cached_property
    def _key(self) -> str:
        prefix = load_settings().prefix if self._prefix is None else self._prefix
        return f"{prefix}sf:notes:{{{self._name}}}"

    @property
    def _generation_key(self) -> str:
        return f"{self._key}:generation"

    async def append(self, note: str) -> None:
        """Append a note."""
        await self._clients.get().xadd(self._key, {"note": note}, maxlen=self._most)

    async def after(self, place: str) -> NotesPage:
        """Return up to a thousand notes after `place`."""
        generation, _, seen = place.partition(":")
        found, now = await self._read(f"({seen}" if seen else "-")
        cleared = place != START and generation != now
        if cleared:
            found, now = await self._read("-")
        last = found[-1][0] if found else ("" if cleared else seen)
        return NotesPage(tuple(fields["note"] for _, fields in found), f"{now}:{last}", cleared)

    async def clear(self) -> None:
        """Remove all notes."""
        async with self._clients.get().pipeline(transaction=True) as pipe:
            pipe.delete(self._key)
            pipe.incr(self._generation_key)
            await pipe.execute()

    async def aclose(self) -> None:
        """Disconnect in this event loop."""
        await self._clients.close(lambda client: client.aclose())

    async def _read(self, start: str) -> tuple[list[Any], str]:
        async with self._clients.get().pipeline(transaction=True) as pipe:
            pipe.xrange(self._key, min=start, count=PAGE)
            pipe.get(self._generation_key)
            found, generation = await pipe.execute()
        return found, str(generation or 0)
