"""One look at all runs that a client waits for or follows, however many wait.

A look asks for the standing of every watched run in one round trip, and wakes those whose run has
moved. Looks follow each other quickly while something moves. With many runs they become rarer, so
that the work of looking is bounded, whoever waits for how many.

A run whose worker died before it heard of a cancel is cancelled by whoever looks at it behind its
lease: there may be no other worker to do it.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from stepfleet.orchestrator.errors import StoreError
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store.keys import Keys
from stepfleet.orchestrator.store.records.codec import milliseconds

SHORTEST_LOOK = 0.02
LONGEST_LOOK = 0.25
MOST_SECONDS = 2.0
ASKED_PER_SECOND = 1000
"""Runs that looks ask for; with more of them looks become rarer, up to `MOST_SECONDS` apart."""
ASKED_AT_ONCE = 500
_FIELDS = ("status", "seq", "step", "updated")
_LEFT_FIELDS = ("want", "want_note", "token", "lease")
Cancel = Callable[[str, str], Awaitable[object]]
"""Asks once more for the cancel of a run (id, note)."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a run is: equal ones mean that nothing has happened that a client could read.

    `status` is None for a run that is not there (any more); `events` counts what it has told.
    """

    status: Lifecycle | None = None
    events: int = 0
    step: str = ""
    updated: str = ""
    chunk: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, or is not there."""
        return self.status is None or self.status.is_terminal


def cancel_is_left(header: Mapping[str, str | None], now: datetime) -> bool:
    """Return whether a run is to be cancelled, and its worker's lease ran out before it heard.

    A hint only: the script that cancels decides, by Redis's clock. Pure.
    """
    held = header.get("token") and header.get("want") == "cancel"
    return bool(held) and int(header.get("lease") or 0) <= milliseconds(now)


class _Waiter:
    def __init__(self, run_id: str, seen: Standing | None, *, chunks: bool, end: bool) -> None:
        self.run_id = run_id
        self.chunks = chunks
        self._seen = seen
        self._end = end
        self.answer: asyncio.Future[Standing] = asyncio.get_running_loop().create_future()

    @property
    def is_new(self) -> bool:
        """Whether it knows nothing of its run yet."""
        return self._seen is None

    def hear(self, standing: Standing) -> bool:
        """Answer if this is what was waited for, and tell whether it is."""
        if self.answer.done() or standing == self._seen or (self._end and not standing.is_over):
            return False
        self.answer.set_result(standing)
        return True


class RunWatch:
    """Watches runs for everybody in one event loop. `aclose` lets nobody wait any more.

    `cancel` is asked for a cancel that a dead worker left undone.
    """

    def __init__(self, connection: Connection, keys: Keys, cancel: Cancel) -> None:
        self._connection = connection
        self._keys = keys
        self._cancel = cancel
        self._waiters: set[_Waiter] = set()
        self._looking: asyncio.Task[None] | None = None
        self._joined = asyncio.Event()

    async def moved(
        self, run_id: str, seen: Standing | None = None, *, chunks: bool = False
    ) -> Standing:
        """Return the run's standing when it differs from `seen`: at once where that is None.

        `chunks` counts text that is being written. Raises `StoreError`.
        """
        return await self._answer(_Waiter(run_id, seen, chunks=chunks, end=False))

    async def ended(self, run_id: str) -> Standing:
        """Return the run's standing when it has ended. Raises `StoreError`."""
        return await self._answer(_Waiter(run_id, None, chunks=False, end=True))

    async def aclose(self) -> None:
        """End the looks; who still waits gets a `StoreError`."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        self._fail(StoreError("the fleet was closed while a run was waited for"))

    async def _answer(self, waiter: _Waiter) -> Standing:
        self._waiters.add(waiter)
        if waiter.is_new:
            self._joined.set()
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        try:
            return await waiter.answer
        finally:
            self._waiters.discard(waiter)

    async def _look(self) -> None:
        pause = SHORTEST_LOOK
        while self._waiters:
            self._joined.clear()
            waiting = tuple(self._waiters)
            try:
                standings = await self._standings(waiting)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is those who wait's
                self._fail(error)
                return
            heard = sum(one.hear(standings[one.run_id]) for one in waiting)
            pause = SHORTEST_LOOK if heard else min(pause * 1.5, LONGEST_LOOK)
            least = min(max(len(standings) / ASKED_PER_SECOND, SHORTEST_LOOK), MOST_SECONDS)
            await self._rest(least, max(pause - least, 0.0))

    async def _rest(self, seconds: float, more: float) -> None:
        """Wait for the next look, which comes without `more` seconds where somebody joins."""
        await asyncio.sleep(seconds)
        if more:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._joined.wait(), more)

    async def _standings(self, waiting: Iterable[_Waiter]) -> dict[str, Standing]:
        chunks: dict[str, bool] = {}
        for one in waiting:
            chunks[one.run_id] = one.chunks or chunks.get(one.run_id, False)
        found: dict[str, Standing] = {}
        asked = list(chunks.items())
        for at in range(0, len(asked), ASKED_AT_ONCE):
            found |= await self._page(asked[at : at + ASKED_AT_ONCE])
        return found

    async def _page(self, asked: list[tuple[str, bool]]) -> dict[str, Standing]:
        fields = (*_FIELDS, *_LEFT_FIELDS)
        heads = [("HMGET", self._keys.run(run_id), *fields) for run_id, _ in asked]
        told = [
            ("XREVRANGE", f"{self._keys.run(run_id)}:chunks", "+", "-", "COUNT", 1)
            for run_id, chunks in asked
            if chunks
        ]
        replies = await self._connection.execute_all(*heads, *told)
        newest = iter(replies[len(heads) :])
        found = {}
        for (run_id, chunks), head in zip(asked, replies, strict=False):
            found[run_id] = _standing(head[: len(_FIELDS)], next(newest) if chunks else ())
            await self._settle(run_id, dict(zip(_LEFT_FIELDS, head[len(_FIELDS) :], strict=True)))
        return found

    async def _settle(self, run_id: str, left: Mapping[str, str | None]) -> None:
        """Cancel a run that its worker left behind; the next look finds it ended."""
        if left["want"] and cancel_is_left(left, await self._connection.now()):
            await self._cancel(run_id, left["want_note"] or "")

    def _fail(self, error: Exception) -> None:
        for waiter in self._waiters:
            if not waiter.answer.done():
                waiter.answer.set_exception(error)


def _standing(head: Sequence[str | None], newest: Sequence[tuple[str, object]]) -> Standing:
    status, events, step, updated = head
    return Standing(
        status=Lifecycle(status) if status else None,
        events=int(events or 0),
        step=step or "",
        updated=updated or "",
        chunk=str(newest[0][0]) if newest else "",
    )
