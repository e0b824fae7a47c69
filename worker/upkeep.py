"""Keeps what this process holds: renews its leases in rounds, and at once where one looks lapsed.

Knows nothing of steps; how a lease is renewed is the business of `renewals`.
"""

import asyncio

from stepfleet.worker.call_leases import CallLeases
from stepfleet.worker.leases import Leases, heed, renew_each
from stepfleet.worker.renewals import Renewals

RENEWALS_PER_LEASE = 3


class Upkeep:
    """Renews the leases of steps and calls by `renewals`, each three times in `lease` s."""

    def __init__(self, leases: Leases, calls: CallLeases, renewals: Renewals, lease: float) -> None:
        self._leases = leases
        self._calls = calls
        self.renewals = renewals
        self._pause = lease / RENEWALS_PER_LEASE

    async def watch(self) -> None:
        """Renew until cancelled."""
        while True:
            await asyncio.sleep(self._pause)
            await self._leases.renew(self.renewals.step)
            await self._calls.renew(self.renewals.call)

    async def renew(self, run_id: str) -> None:
        """Renew what is held of a run, at once; answers that take longer are heard later."""
        if lease := self._leases.find(run_id):
            await renew_each([lease], self.renewals.step, heed)
        await self._calls.renew(self.renewals.call, run_id)
