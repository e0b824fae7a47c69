"""Renews the leases of this process's work, and of what other processes do for it.

Decides how long a renewal lasts: what is tried in a process of its own has a longer lease. That
process cannot renew it while it starts, whoever could may die first, and on a last chance a lease
that runs out by mistake ends a run.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Self

from stepfleet.orchestrator.protocol.waiting import Kept
from stepfleet.orchestrator.store.opening import OpenStore
from stepfleet.orchestrator.store.steps import Held, StepStore, Terms
from stepfleet.worker.call_leases import CallLease
from stepfleet.worker.leases import Lease, Term

TRIAL_SECONDS = 60.0
"""A lease lasts so long at least while a process of its own has the work: an interpreter with its
agents takes 1 to 3 seconds to start, and ten times that where many start at once."""


class Renewals:
    """Renews by the stores that `make` returns for leases of so many seconds."""

    def __init__(self, make: Callable[[float], StepStore], lease: float) -> None:
        self._stores = {
            Term.ORDINARY: make(lease),
            Term.LONG: make(max(lease, TRIAL_SECONDS)),
            Term.OVER: make(0.0),
        }

    @classmethod
    def over(cls, opened: OpenStore, terms: Terms) -> Self:
        """Return what renews over an open store, under the worker's terms."""

        def make(lease: float) -> StepStore:
            own = replace(terms, lease=lease)
            return StepStore(opened.connection, opened.keys, opened.configs, opened.dispatch, own)

        return cls(make, terms.lease)

    async def step(self, lease: Lease) -> Held:
        """Renew a step's lease. Raises `StoreError` when Redis stays out of reach."""
        return await self._stores[lease.term].journal(lease.claim, lease.seconds)

    async def call(self, lease: CallLease) -> Kept:
        """Renew a tool call's lease. Raises `StoreError` when Redis stays out of reach."""
        taken, calls = lease.taken, self._stores[lease.term].calls
        return await calls.keep(taken.hint, taken.token, lease.seconds)
