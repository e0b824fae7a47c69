"""The steps and tool calls that this process holds: their clocks, interruption and renewal.

Knows nothing of Redis or Celery: renewal is a callable.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any, Self, TypeVar

from stepfleet.orchestrator.protocol.attempt import Interruption
from stepfleet.orchestrator.protocol.claim import Claim, Held, Want, Work
from stepfleet.orchestrator.protocol.waiting import TakenCall
from stepfleet.worker.engine.bridge import TERMINATED, TIME_IS_UP

log = logging.getLogger(__name__)

ROUND_SECONDS = 0.1
"""A round waits for renewals for at most this long: less than the shortest lease."""

Renew = Callable[["Lease"], Awaitable[Held]]
_T = TypeVar("_T")


class Lease:
    """A step or a tool call in the hands of this process: among `held` until its block ends."""

    def __init__(
        self, work: Claim | TakenCall, elapsed: Callable[[], float], held: dict[Work, "Lease"]
    ) -> None:
        self.work = work
        self.interruption: Interruption | None = None
        self._elapsed = elapsed
        self._began = elapsed()
        self._attempt: asyncio.Task[Any] | None = asyncio.current_task()
        self._released: asyncio.Future[None] | None = None
        self._renewal: asyncio.Task[None] | None = None
        self._hint, self._held = work.hint, held
        held[self._hint] = self

    def __enter__(self) -> Self:
        """Return the lease."""
        return self

    def __exit__(self, *_: object) -> None:
        """Drop the lease, and the renewal in progress."""
        if self._renewal is not None:
            self._renewal.cancel()
        if self._released is not None and not self._released.done():
            self._released.set_result(None)
        if self._held.get(self._hint) is self:
            del self._held[self._hint]

    @property
    def seconds(self) -> float:
        """Monotonic seconds since the claim."""
        return self._elapsed() - self._began

    @property
    def now(self) -> datetime:
        """Redis's time now: that of the claim, carried on by the monotonic clock."""
        return self.work.now + timedelta(seconds=self.seconds)

    def interrupted_by(self, cancelled: asyncio.CancelledError) -> Interruption:
        """Return why the attempt was interrupted.

        Time limits and revocations are named in the cancellation. Any other cancellation (the
        worker is shut down) hands the step back, to be executed again.
        """
        if self.interruption is not None:
            return self.interruption
        if TIME_IS_UP in cancelled.args:
            return Interruption.TIMED_OUT
        ended = TERMINATED in cancelled.args
        return Interruption.TERMINATED if ended else Interruption.HANDED_BACK

    def interrupt(self, by: Interruption) -> None:
        """Interrupt the attempt; the first reason counts."""
        if self.interruption is None:
            self.interruption = by
            if self._attempt is not None:
                self._attempt.cancel()

    def apply(self, held: Held) -> None:
        """Interrupt the attempt if the work was taken over, or a cancel is requested."""
        if not held.ours:
            self.interrupt(Interruption.LEASE_LOST)
        elif held.want == Want.CANCEL:
            self.interrupt(Interruption.CANCELLED)

    def settle(self) -> None:
        """From here on the attempt only commits: nothing interrupts it."""
        self._attempt = None

    def renew(self, renew: Renew) -> asyncio.Task[None] | None:
        """Start a renewal and return it, or None while one is in progress."""
        if self._renewal is not None and not self._renewal.done():
            return None
        self._renewal = asyncio.create_task(self._renewed(renew))
        return self._renewal

    async def _renewed(self, renew: Renew) -> None:
        with suppress(Exception):  # the next round tries again
            self.apply(await renew(self))

    async def is_kept(self) -> bool:
        """Tell whether the attempt goes on; waits for the end of one that only commits."""
        if self._attempt is not None:
            return True
        if self._released is None:
            self._released = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._released)
        return False


class Leases:
    """All steps and tool calls that this process holds."""

    def __init__(self, elapsed: Callable[[], float]) -> None:
        self.held: dict[Work, Lease] = {}
        self.draining = False
        self._elapsed = elapsed
        self._hands_back = False
        self._writes: set[asyncio.Task[object]] = set()

    def __len__(self) -> int:
        return len(self.held)

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self.held.values()))

    @property
    def calls(self) -> int:
        """How many of them are tool calls."""
        return sum(work.index is not None for work in list(self.held))

    def hold(self, work: Claim | TakenCall) -> Lease:
        """Return the lease of an attempt at work, renewed with the others until its block ends."""
        lease = Lease(work, self._elapsed, self.held)
        if self._hands_back:  # it was being claimed when the others were handed back
            lease.interrupt(Interruption.HANDED_BACK)
        return lease

    def of(self, run_id: str) -> list[Lease]:
        """Return the leases on a run's step and tool calls."""
        held = list(self.held.items())  # at once: remote control asks in a thread of its own
        return [lease for work, lease in held if work.run_id == run_id]

    async def keeps(self, work: Work) -> bool:
        """Tell whether this process works on what a further message names.

        Its lease may look lapsed: to a Redis whose clock was set forward, or after a pause of this
        process. A process that holds the work must not begin it again.
        """
        lease = self.held.get(work)
        return lease is not None and await lease.is_kept()

    def hand_back(self) -> None:
        """Interrupt all attempts, so that other workers take their runs over at once."""
        self._hands_back = True
        for lease in self:
            lease.interrupt(Interruption.HANDED_BACK)

    async def renew(self, renew: Renew, some: Iterable[Lease] | None = None) -> None:
        """Renew `some` leases (default all) that are not being renewed yet.

        Returns when all are answered or after `ROUND_SECONDS`; renewals that take longer go on:
        where a part of Redis is away, leases on the others cannot wait for it, and its own are
        renewed as soon as it is back.
        """
        begun = [lease.renew(renew) for lease in (self if some is None else some)]
        if waited_for := [renewal for renewal in begun if renewal is not None]:
            await asyncio.wait(waited_for, timeout=ROUND_SECONDS)

    async def complete(
        self, work: Coroutine[Any, Any, _T], then: Callable[[], Coroutine[Any, Any, object]]
    ) -> _T:
        """Return what `work` returns; if it is cancelled, `then` is still made to its end."""
        try:
            return await work
        except asyncio.CancelledError:
            task = asyncio.create_task(then())
            self._writes.add(task)
            task.add_done_callback(self._written)
            raise

    async def settle(self, seconds: float) -> None:
        """Return when all writes of cancelled attempts are made, or after `seconds`."""
        if self._writes:
            await asyncio.wait(set(self._writes), timeout=seconds)

    def _written(self, write: asyncio.Task[object]) -> None:
        self._writes.discard(write)
        if not write.cancelled() and (error := write.exception()):
            log.warning("an interrupted step could not be committed: %r", error)
