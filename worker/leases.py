"""The steps that this process holds: their clocks, their interruption, their renewal.

Knows nothing of Redis or Celery: renewal is a callable.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from stepfleet.orchestrator.protocol.attempt import Interruption, Span
from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.worker.bridge import TIME_IS_UP


class Term(StrEnum):
    """How long a renewal lasts."""

    ORDINARY = "ordinary"
    LONG = "long"  # in the hands of a process of its own, which may not be renewing yet
    OVER = "over"  # that process has died; whoever is next may have it


class Holding:
    """Work in the hands of this process since `since` (UTC, by Redis's clock)."""

    def __init__(self, since: datetime, elapsed: Callable[[], float]) -> None:
        self.interruption: Interruption | None = None
        self.term = Term.ORDINARY
        self._since = since
        self._elapsed = elapsed
        self._began = elapsed()
        self._work: asyncio.Task[Any] | None = asyncio.current_task()

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

        Only a soft time limit says so in the cancellation; whatever else ends a task without
        a word (a worker that is shot down) hands the step back, to be done again.
        """
        if self.interruption is not None:
            return self.interruption
        return Interruption.TIMED_OUT if TIME_IS_UP in cancelled.args else Interruption.HANDED_BACK

    def interrupt(self, by: Interruption) -> None:
        """Break the attempt off; the first reason counts."""
        if self.interruption is None:
            self.interruption = by
            if self._work is not None:
                self._work.cancel()

    def settle(self) -> None:
        """From here on the attempt only commits: nothing may break it off any more."""
        self._work = None


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


class Leases:
    """All steps that this process holds, by run id."""

    def __init__(self, elapsed: Callable[[], float]) -> None:
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
            if self._held.get(claim.run_id) is lease:
                del self._held[claim.run_id]

    def find(self, run_id: str) -> Lease | None:
        """Return the lease on a run's step, if this process holds it."""
        return self._held.get(run_id)

    def hand_back(self) -> None:
        """Break off all attempts, so that other workers take their runs over at once."""
        self._hands_back = True
        for lease in self:
            lease.interrupt(Interruption.HANDED_BACK)

    async def renew(self, once: Callable[[Lease], Awaitable[Any]]) -> None:
        """Renew all leases by `once`, which answers whether the step is ours and what is wanted."""
        leases = list(self)
        answers = await asyncio.gather(*(once(lease) for lease in leases), return_exceptions=True)
        for lease, answer in zip(leases, answers, strict=True):
            if isinstance(answer, BaseException):
                continue
            heed(lease, answer)


def heed(lease: Lease, held: Any) -> None:
    """Interrupt the attempt if the step was taken over, or a cancel is wanted."""
    if not held.ours:
        lease.interrupt(Interruption.LEASE_LOST)
    elif held.want == "cancel":
        lease.interrupt(Interruption.CANCELLED)
