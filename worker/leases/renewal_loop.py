"""Keeps what this process holds: renews its leases in rounds, and at once where one looks lapsed.

Knows nothing of steps; how a lease is renewed is the business of `renewals`.
"""

import asyncio
from typing import Self

from celery import Celery

from stepfleet.orchestrator.store.opening.opening import OpenStore
from stepfleet.orchestrator.store.runs.steps import Terms
from stepfleet.worker.leases.blocked_loop import Standby, connecting
from stepfleet.worker.leases.call_lease import CallLeases
from stepfleet.worker.leases.lease import Leases, heed, renew_each
from stepfleet.worker.leases.renewal import Renewals

RENEWALS_PER_LEASE = 3


class Upkeep:
    """Renews the leases of steps and calls by `renewals`, each three times in `lease` s."""

    def __init__(
        self,
        leases: Leases,
        calls: CallLeases,
        renewals: Renewals,
        lease: float,
        standby: Standby | None = None,
    ) -> None:
        self._leases = leases
        self._calls = calls
        self.renewals = renewals
        self._standby = standby
        self._pause = lease / RENEWALS_PER_LEASE

    @classmethod
    def over(
        cls,
        opened: OpenStore,
        terms: Terms,
        leases: Leases,
        calls: CallLeases,
        app: Celery | None,
    ) -> Self:
        """Return the upkeep of the running loop; with an `app`, a thread stands by for it."""
        renewals, settings = Renewals.over(opened, terms), opened.settings
        standby = None
        if app is not None:
            connect = connecting(settings, app, terms)
            limit = settings.blocked_limit
            standby = Standby(leases, calls, connect, lease=terms.lease, limit=limit)
        return cls(leases, calls, renewals, settings.lease, standby)

    async def watch(self) -> None:
        """Renew until cancelled; while the loop is blocked, `standby` does."""
        try:
            await self._watch()
        finally:
            if self._standby:
                await self._standby.aclose()

    async def _watch(self) -> None:
        if self._standby:
            self._standby.start()
        while True:
            await asyncio.sleep(self._pause)
            if self._standby:
                self._standby.seen()
            await self._leases.renew(self.renewals.step)
            await self._calls.renew(self.renewals.call)

    async def renew(self, run_id: str) -> None:
        """Renew what is held of a run, at once; answers that take longer are heard later."""
        if lease := self._leases.find(run_id):
            await renew_each([lease], self.renewals.step, heed)
        await self._calls.renew(self.renewals.call, run_id)

    async def renew_batch(self, batch_id: str) -> None:
        """Renew what is held of a batch's runs, and all tool calls, at once."""
        held = [lease for lease in self._leases if lease.claim.batch_id == batch_id]
        await renew_each(held, self.renewals.step, heed)
        await self._calls.renew(self.renewals.call)
