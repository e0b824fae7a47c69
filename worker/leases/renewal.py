"""Renews the leases of this process: in rounds, and at once where a lease looks lapsed."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager
from typing import Self

from celery import Celery

from stepfleet.orchestrator.protocol.claim import Held
from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.orchestrator.store.runs.steps import StepStore
from stepfleet.orchestrator.store.store import Store, open_store
from stepfleet.worker.leases.blocked_loop import LOOKS_PER_LEASE, Connect, Standby
from stepfleet.worker.leases.lease import AnyLease, CallLease, Leases, Renew

RENEWALS_PER_LEASE = 3


def renewing(store: StepStore) -> Renew:
    """Return what renews a lease by `store`. Raises `StoreError` when Redis stays out of reach."""

    async def renew(lease: AnyLease) -> Held:
        if isinstance(lease, CallLease):
            taken = lease.taken
            return await store.calls.keep(taken.hint, taken.token, lease.seconds)
        return await store.journal(lease.claim, lease.seconds)

    return renew


def connecting(settings: Settings, app: Celery) -> Connect:
    """Return what opens a connection of its own for renewals, and closes it."""
    quick = settings.model_copy(
        update={"patience": settings.lease / LOOKS_PER_LEASE, "connections": 1}
    )

    @asynccontextmanager
    async def connect() -> AsyncIterator[Renew]:
        async with aclosing(await open_store(quick, app)) as opened:
            yield renewing(opened.steps)

    return connect


class Renewal:
    """Renews `leases` by `renew`, each three times in `lease` seconds.

    While the event loop is blocked, `standby` does.
    """

    def __init__(
        self, leases: Leases, renew: Renew, lease: float, standby: Standby | None = None
    ) -> None:
        self._leases = leases
        self.once = renew
        self._standby = standby
        self._pause = lease / RENEWALS_PER_LEASE

    @classmethod
    def over(cls, opened: Store, leases: Leases, app: Celery | None) -> Self:
        """Return the renewal of the running loop; with an `app`, a thread stands by for it."""
        settings, standby = opened.settings, None
        if app is not None:
            connect = connecting(settings, app)
            standby = Standby(leases, connect, lease=settings.lease, limit=settings.blocked_limit)
        return cls(leases, renewing(opened.steps), settings.lease, standby)

    async def watch(self) -> None:
        """Renew until cancelled."""
        try:
            if self._standby:
                self._standby.start()
            while True:
                await asyncio.sleep(self._pause)
                if self._standby:
                    self._standby.seen()
                await self._leases.renew(self.once)
        finally:
            if self._standby:
                await self._standby.aclose()

    async def renew(self, run_id: str, batch_id: str = "") -> None:
        """Renew the leases of a run, or of a batch (and of all tool calls), at once."""
        held: Iterable[AnyLease] = self._leases.of(run_id)
        if batch_id:
            steps = self._leases.steps.values()
            held = [lease for lease in steps if lease.claim.batch_id == batch_id]
            held = [*held, *self._leases.calls.values()]
        await self._leases.renew(self.once, held)
