"""The tool calls that this process makes as tasks of their own. Knows neither Redis nor Celery."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from stepfleet.orchestrator.protocol.attempt import Interruption
from stepfleet.orchestrator.protocol.waiting import TakenCall, ToolHint
from stepfleet.worker.leases.lease import Holding, SeenThrough, renew_each


class CallLease(Holding):
    """One tool call in the hands of this process."""

    def __init__(self, taken: TakenCall, elapsed: Callable[[], float]) -> None:
        super().__init__(taken.now, elapsed)
        self.taken = taken


class CallLeases(SeenThrough):
    """All tool calls that this process makes as tasks of their own."""

    def __init__(self, elapsed: Callable[[], float]) -> None:
        super().__init__()
        self._elapsed = elapsed
        self._held: dict[ToolHint, CallLease] = {}
        self._hands_back = False

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[CallLease]:
        return iter(list(self._held.values()))

    @contextmanager
    def hold(self, taken: TakenCall) -> Iterator[CallLease]:
        """Keep a call among those that are renewed, for the time of its attempt."""
        lease = CallLease(taken, self._elapsed)
        self._held[taken.hint] = lease
        if self._hands_back:  # it was being taken when the others were handed back
            lease.interrupt(Interruption.HANDED_BACK)
        try:
            yield lease
        finally:
            lease.release()
            if self._held.get(taken.hint) is lease:
                del self._held[taken.hint]

    async def keeps(self, hint: ToolHint) -> bool:
        """Tell whether this process makes the call that a further hint names; see `Leases`."""
        lease = self._held.get(hint)
        return lease is not None and await lease.is_kept()

    def of(self, run_id: str) -> list[CallLease]:
        """Return the leases on calls of a run."""
        return [lease for lease in self._held.values() if lease.taken.hint.run_id == run_id]

    def hand_back(self) -> None:
        """Break off all calls, so that other workers take them over."""
        self._hands_back = True
        for lease in list(self._held.values()):
            lease.interrupt(Interruption.HANDED_BACK)

    async def renew(
        self, once: Callable[[CallLease], Awaitable[Any]], run_id: str | None = None
    ) -> None:
        """Renew all leases, or those of one run, by `once`; break off what nobody waits for.

        Returns as `renew_each` does.
        """
        leases = list(self._held.values()) if run_id is None else self.of(run_id)
        await renew_each(leases, once, heed)


def heed(lease: CallLease, kept: Any) -> None:
    """Interrupt the call if it was taken over, or nobody waits for it any more."""
    if not kept.ours:
        lease.interrupt(Interruption.LEASE_LOST)
