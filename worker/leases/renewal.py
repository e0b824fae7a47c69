"""Renews the leases of this process: in rounds, and at once where a lease looks lapsed."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Self

from celery import Celery

from stepfleet.orchestrator.protocol.claim import Held
from stepfleet.orchestrator.protocol.waiting import TakenCall
from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.orchestrator.store.opening.opening import OpenStore, open_store
from stepfleet.orchestrator.store.runs.steps import StepStore, Terms
from stepfleet.worker.leases.blocked_loop import LOOKS_PER_LEASE, Connect, Standby
from stepfleet.worker.leases.lease import Lease, Leases, Renew

RENEWALS_PER_LEASE = 3


def renewing(store: StepStore) -> Renew:
    """Return what renews a lease by `store`. Raises `StoreError` when Redis stays out of reach."""

    async def renew(lease: Lease) -> Held:
        work = lease.work
        if isinstance(work, TakenCall):
            return await store.calls.keep(work.hint, work.token, lease.seconds)
        return await store.journal(work, lease.seconds)

    return renew


def connecting(settings: Settings, app: Celery, terms: Terms) -> Connect:
    """Return what opens a connection of its own for renewals, and closes it."""
    quick = settings.model_copy(
        update={"patience": terms.lease / LOOKS_PER_LEASE, "connections": 1}
    )

    @asynccontextmanager
    async def connect() -> AsyncIterator[Renew]:
        opened = await open_store(quick, app)
        given = (opened.connection, opened.keys, opened.configs, opened.dispatch)
        try:
            yield renewing(StepStore(*given, terms))
        finally:
            await opened.aclose()

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
    def over(cls, opened: OpenStore, store: StepStore, leases: Leases, app: Celery | None) -> Self:
        """Return the renewal of the running loop; with an `app`, a thread stands by for it."""
        settings, standby = opened.settings, None
        if app is not None:
            connect = connecting(settings, app, store.terms)
            standby = Standby(leases, connect, lease=settings.lease, limit=settings.blocked_limit)
        return cls(leases, renewing(store), settings.lease, standby)

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
        held: Iterable[Lease] = self._leases.of(run_id)
        if batch_id:
            held = [
                lease
                for lease in self._leases
                if isinstance(lease.work, TakenCall) or lease.work.batch_id == batch_id
            ]
        await self._leases.renew(self.once, held)
