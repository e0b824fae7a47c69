"""How memories keep their index up with the notes, whoever added them. Knows no index."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from stepfleet.orchestrator.agents.recall.notes import START, Notes
from stepfleet.orchestrator.agents.recall.per_loop import OnePerLoop

Take = Callable[[Sequence[str]], None]
AT_ONCE = 20
"""So many notes are taken without a thread."""


class Following:
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
