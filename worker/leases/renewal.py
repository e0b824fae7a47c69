"""Renews the leases of this process's work, also of what processes for suspects do for it."""

from typing import Self

from stepfleet.orchestrator.protocol.claim import Held
from stepfleet.orchestrator.store.opening.opening import OpenStore
from stepfleet.orchestrator.store.runs.steps import StepStore, Terms
from stepfleet.worker.leases.call_lease import CallLease
from stepfleet.worker.leases.lease import Lease


class Renewals:
    """Renews by `store`, for as long as its leases last."""

    def __init__(self, store: StepStore) -> None:
        self._store = store

    @classmethod
    def over(cls, opened: OpenStore, terms: Terms) -> Self:
        """Return what renews over an open store, under the worker's terms."""
        given = (opened.connection, opened.keys, opened.configs, opened.dispatch)
        return cls(StepStore(*given, terms))

    async def step(self, lease: Lease) -> Held:
        """Renew a step's lease. Raises `StoreError` when Redis stays out of reach."""
        return await self._store.journal(lease.claim, lease.seconds)

    async def call(self, lease: CallLease) -> Held:
        """Renew a tool call's lease. Raises `StoreError` when Redis stays out of reach."""
        taken = lease.taken
        return await self._store.calls.keep(taken.hint, taken.token, lease.seconds)
