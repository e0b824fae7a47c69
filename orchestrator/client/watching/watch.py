"""Polls all runs that a client waits for or follows, many waiters with one poll.

A poll reads the position of every watched run in one round trip, and wakes the waiters whose run
has moved. Polls are frequent while something moves, and rarer with many runs, so that their load
is bounded.

A run whose worker died before it learned of a cancel is cancelled by the first poll after its
lease: there may be no other worker to do it.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice

from stepfleet.orchestrator.client.watching.standstill import Quiet
from stepfleet.orchestrator.errors import StoreError
from stepfleet.orchestrator.protocol.claim import Want
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.store.codec import milliseconds
from stepfleet.orchestrator.store.store import Store

SHORTEST_LOOK = 0.02
LONGEST_LOOK = 0.25
MOST_SECONDS = 2.0
POLLED_PER_SECOND = 1000
"""Runs that polls read; with more of them polls become rarer, up to `MOST_SECONDS` apart."""
POLLED_AT_ONCE = 500
_FIELDS = ("status", "seq", "step", "updated")
_LEFT_FIELDS = ("want", "want_note", "token", "lease")
SAMPLED = 50
"""The most runs whose waits are read where nothing moves."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far a run is: equal positions mean that there is nothing new to read.

    `status` is None for a run that is not there (any more); `events` counts its events.
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
    """Return whether a run is to be cancelled, and its worker's lease ended before it did so.

    A hint only: the script that cancels decides, by Redis's clock. Pure.
    """
    held = header.get("token") and header.get("want") == Want.CANCEL
    return bool(held) and int(header.get("lease") or 0) <= milliseconds(now)


class _Waiter:
    def __init__(self, run_id: str, seen: Position | None, *, chunks: bool, end: bool) -> None:
        self.run_id = run_id
        self.chunks = chunks
        self._seen = seen
        self._end = end
        self.result: asyncio.Future[Position] = asyncio.get_running_loop().create_future()

    @property
    def is_new(self) -> bool:
        """Whether it knows nothing of its run yet."""
        return self._seen is None

    def wake(self, position: Position) -> bool:
        """Set the result if the run has moved (or ended), and return whether it was set."""
        if self.result.done() or position == self._seen or (self._end and not position.is_over):
            return False
        self.result.set_result(position)
        return True


class RunWatch:
    """Watches runs for all waiters of one event loop. `aclose` fails those that still wait.

    Completes a cancel that a dead worker left undone. `quiet`, if given, returns what reports why
    none of the runs (that a function returns) moves.
    """

    def __init__(
        self,
        store: Store,
        quiet: Callable[[Callable[[], Sequence[str]]], Quiet] | None = None,
    ) -> None:
        self._connection, self._reads = store.connection, store.reads
        self._keys = store.keys
        self._cancel = store.control.cancel_unread
        self._quiet = quiet
        self._waiters: set[_Waiter] = set()
        self._polling: asyncio.Task[None] | None = None
        self._joined = asyncio.Event()

    async def moved(
        self, run_id: str, seen: Position | None = None, *, chunks: bool = False
    ) -> Position:
        """Return the run's position when it differs from `seen`: at once where that is None.

        `chunks` counts text that is being written. Raises `StoreError`.
        """
        return await self._wait(_Waiter(run_id, seen, chunks=chunks, end=False))

    async def ended(self, run_id: str) -> Position:
        """Return the run's position when it has ended. Raises `StoreError`."""
        return await self._wait(_Waiter(run_id, None, chunks=False, end=True))

    async def aclose(self) -> None:
        """End the polls; waiters get a `StoreError`."""
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.wait([self._polling])
        self._fail(StoreError("the fleet was closed while a run was waited for"))

    async def _wait(self, waiter: _Waiter) -> Position:
        self._waiters.add(waiter)
        if waiter.is_new:
            self._joined.set()
        if self._polling is None or self._polling.done():
            self._polling = asyncio.create_task(self._poll())
        try:
            return await waiter.result
        finally:
            self._waiters.discard(waiter)

    async def _poll(self) -> None:
        pause = SHORTEST_LOOK
        quiet = self._quiet and self._quiet(
            lambda: [one.run_id for one in islice(self._waiters, SAMPLED)]
        )
        while self._waiters:
            self._joined.clear()
            waiting = tuple(self._waiters)
            try:
                positions = await self._positions(waiting)
            except Exception as error:  # noqa: BLE001 - every error is the waiters'
                self._fail(error)
                return
            woken = sum(one.wake(positions[one.run_id]) for one in waiting)
            pause = SHORTEST_LOOK if woken else min(pause * 1.5, LONGEST_LOOK)
            least = min(max(len(positions) / POLLED_PER_SECOND, SHORTEST_LOOK), MOST_SECONDS)
            if quiet:
                await quiet.tick(idle=not woken)
            await self._rest(least, max(pause - least, 0.0))

    async def _rest(self, seconds: float, more: float) -> None:
        """Wait for the next poll, without the `more` seconds if another waiter joins."""
        await asyncio.sleep(seconds)
        if more:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._joined.wait(), more)

    async def _positions(self, waiting: Iterable[_Waiter]) -> dict[str, Position]:
        chunks: dict[str, bool] = {}
        for one in waiting:
            chunks[one.run_id] = one.chunks or chunks.get(one.run_id, False)
        found: dict[str, Position] = {}
        runs = list(chunks.items())
        for at in range(0, len(runs), POLLED_AT_ONCE):
            found |= await self._page(runs[at : at + POLLED_AT_ONCE])
        return found

    async def _page(self, runs: list[tuple[str, bool]]) -> dict[str, Position]:
        fields = (*_FIELDS, *_LEFT_FIELDS)
        heads = [("HMGET", self._keys.run(run_id), *fields) for run_id, _ in runs]
        newest_chunks = [
            ("XREVRANGE", f"{self._keys.run(run_id)}:chunks", "+", "-", "COUNT", 1)
            for run_id, chunks in runs
            if chunks
        ]
        replies = await self._reads.execute_all(*heads, *newest_chunks)
        newest = iter(replies[len(heads) :])
        found = {}
        for (run_id, chunks), head in zip(runs, replies, strict=False):
            found[run_id] = _position(head[: len(_FIELDS)], next(newest) if chunks else ())
            await self._settle(run_id, dict(zip(_LEFT_FIELDS, head[len(_FIELDS) :], strict=True)))
        return found

    async def _settle(self, run_id: str, left: Mapping[str, str | None]) -> None:
        """Complete the cancel of a run whose worker is dead; the next poll finds it ended."""
        if left["want"] and cancel_is_left(left, await self._connection.now()):
            await self._cancel(run_id, left["want_note"] or "")

    def _fail(self, error: Exception) -> None:
        for waiter in self._waiters:
            if not waiter.result.done():
                waiter.result.set_exception(error)


def _position(head: Sequence[str | None], newest: Sequence[tuple[str, object]]) -> Position:
    status, events, step, updated = head
    return Position(
        status=Lifecycle(status) if status else None,
        events=int(events or 0),
        step=step or "",
        updated=updated or "",
        chunk=str(newest[0][0]) if newest else "",
    )
