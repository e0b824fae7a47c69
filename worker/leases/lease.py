"""The steps that this process holds: their clocks, their interruption, their renewal.

Knows nothing of Redis or Celery: renewal is a callable.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar

from stepfleet.orchestrator.protocol.attempt import Interruption, Span
from stepfleet.orchestrator.protocol.claim import Claim, StepHint
from stepfleet.worker.engine.bridge import TERMINATED, TIME_IS_UP

log = logging.getLogger(__name__)

HELD_HERE = "by this process"
"""Detail of a refusal: the work that a hint names is in these hands already."""
ROUND_SECONDS = 0.1
"""So long a round waits for renewals: for steps and then calls, less than the shortest lease."""


class Holding:
    """Work in the hands of this process since `since` (UTC, by Redis's clock)."""

    def __init__(self, since: datetime, elapsed: Callable[[], float]) -> None:
        self.interruption: Interruption | None = None
        self._since = since
        self._elapsed = elapsed
        self._began = elapsed()
        self._work: asyncio.Task[Any] | None = asyncio.current_task()
        self._released: asyncio.Future[None] | None = None
        self._renewal: asyncio.Task[None] | None = None

    @property
    def seconds(self) -> float:
        """Monotonic seconds since the claim."""
        return self._elapsed() - self._began

    @property
    def now(self) -> datetime:
        """Redis's time now: that of the claim, carried on by the monotonic clock."""
        return self._since + timedelta(seconds=self.seconds)

    def broken_off_by(self, cancelled: asyncio.CancelledError) -> Interruption:
        """Return who broke the attempt off.

        Time limits and revocations say so in the cancellation; whatever else ends a task without
        a word (a worker that is shot down) hands the step back, to be done again.
        """
        if self.interruption is not None:
            return self.interruption
        if TIME_IS_UP in cancelled.args:
            return Interruption.TIMED_OUT
        ended = TERMINATED in cancelled.args
        return Interruption.TERMINATED if ended else Interruption.HANDED_BACK

    def interrupt(self, by: Interruption) -> None:
        """Break the attempt off; the first reason counts."""
        if self.interruption is None:
            self.interruption = by
            if self._work is not None:
                self._work.cancel()

    def settle(self) -> None:
        """From here on the attempt only commits: no interruption breaks it off."""
        self._work = None

    def begin(self, renewal: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None] | None:
        """Start a renewal and return it, or None while one is under way."""
        if self._renewal is not None and not self._renewal.done():
            return None
        self._renewal = asyncio.create_task(renewal())
        return self._renewal

    def release(self) -> None:
        """Drop the renewal that is under way: nobody holds what it is for."""
        if self._renewal is not None:
            self._renewal.cancel()
        if self._released is not None and not self._released.done():
            self._released.set_result(None)

    async def is_kept(self) -> bool:
        """Tell whether the attempt goes on; one that only commits is waited for, and has ended."""
        if self._work is not None:
            return True
        if self._released is None:
            self._released = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._released)
        return False


class Lease(Holding):
    """One step in the hands of this process; `remembered` is memory work that is journaled."""

    def __init__(self, claim: Claim, elapsed: Callable[[], float]) -> None:
        super().__init__(claim.now, elapsed)
        self.claim = claim
        self.remembered = claim.journal.remembered

    @property
    def span(self) -> Span:
        """When the step started, and how long it has taken.

        A step that has waited for tool calls has parts: their times add up, and the calls' own.
        """
        journal = self.claim.journal
        return Span(journal.began or self.claim.now, journal.spent + self.seconds)


class SeenThrough:
    """Writes that are made to the end although whoever began them no longer waits."""

    def __init__(self) -> None:
        self._writes: set[asyncio.Task[object]] = set()

    def see_through(self, write: Coroutine[Any, Any, object]) -> None:
        """Have a commit or a release made that was broken off."""
        task = asyncio.create_task(write)
        self._writes.add(task)
        task.add_done_callback(self._hear)

    async def settle(self, seconds: float) -> None:
        """Return when all are made, or after so many seconds."""
        if self._writes:
            await asyncio.wait(set(self._writes), timeout=seconds)

    def _hear(self, write: asyncio.Task[object]) -> None:
        self._writes.discard(write)
        if not write.cancelled() and (error := write.exception()):
            log.warning("a step that was broken off could not be committed: %r", error)


class Leases(SeenThrough):
    """All steps that this process holds, by run id."""

    def __init__(self, elapsed: Callable[[], float]) -> None:
        super().__init__()
        self._elapsed = elapsed
        self._held: dict[str, Lease] = {}
        self._hands_back = False
        self.draining = False

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._held.values()))

    @contextmanager
    def hold(self, claim: Claim) -> Iterator[Lease]:
        """Keep a claim among those that are renewed, for the time of its attempt."""
        lease = Lease(claim, self._elapsed)
        self._held[claim.run_id] = lease
        if self._hands_back:  # it was being claimed when the others were handed back
            lease.interrupt(Interruption.HANDED_BACK)
        try:
            yield lease
        finally:
            lease.release()
            if self._held.get(claim.run_id) is lease:
                del self._held[claim.run_id]

    def find(self, run_id: str) -> Lease | None:
        """Return the lease on a run's step, if this process holds it."""
        return self._held.get(run_id)

    async def keeps(self, hint: StepHint) -> bool:
        """Tell whether this process works on the step that a further hint names.

        Its lease may look lapsed: to a Redis whose clock was set forward, or after a pause of this
        process. Whoever has the work must not begin it again.
        """
        lease = self._held.get(hint.run_id)
        return lease is not None and lease.claim.step == hint.step and await lease.is_kept()

    def hand_back(self) -> None:
        """Break off all attempts, so that other workers take their runs over at once."""
        self._hands_back = True
        for lease in self:
            lease.interrupt(Interruption.HANDED_BACK)

    async def renew(self, once: Callable[[Lease], Awaitable[Any]]) -> None:
        """Renew all leases by `once`, which answers whether the step is ours and what is wanted.

        Returns as `renew_each` does.
        """
        await renew_each(self, once, heed)


def heed(lease: Lease, held: Any) -> None:
    """Interrupt the attempt if the step was taken over, or a cancel is wanted."""
    if not held.ours:
        lease.interrupt(Interruption.LEASE_LOST)
    elif held.want == "cancel":
        lease.interrupt(Interruption.CANCELLED)


_Held = TypeVar("_Held", bound=Holding)


async def renew_each(
    holdings: Iterable[_Held],
    once: Callable[[_Held], Awaitable[Any]],
    heeded: Callable[[_Held, Any], None],
) -> None:
    """Renew by `once` what is not being renewed yet; `heeded` hears of each answer.

    Returns when all have answered or after `ROUND_SECONDS`. What takes longer goes on: where a
    part of Redis is away, leases on the others cannot wait for it, and its own are renewed as
    soon as it is back.
    """
    begun = [one.begin(partial(_renew, one, once, heeded)) for one in holdings]
    if waited_for := [renewal for renewal in begun if renewal is not None]:
        await asyncio.wait(waited_for, timeout=ROUND_SECONDS)


async def _renew(
    held: _Held,
    once: Callable[[_Held], Awaitable[Any]],
    heeded: Callable[[_Held, Any], None],
) -> None:
    with suppress(Exception):  # the next round tries again
        heeded(held, await once(held))
