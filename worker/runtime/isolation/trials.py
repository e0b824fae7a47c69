"""What is suspect of ending its workers is tried in processes for suspects.

Decides who is tried so, and who waits first; `suspicion` says what losses mean. Knows nothing of
what a step or a tool call does.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Protocol, Self

from stepfleet.orchestrator.events.envelope import Events
from stepfleet.orchestrator.protocol.attempt import Interruption
from stepfleet.orchestrator.protocol.claim import Claim, StepHint
from stepfleet.orchestrator.protocol.suspicion import Stance, Suspect
from stepfleet.orchestrator.protocol.verdict import Move, Verdict
from stepfleet.orchestrator.protocol.waiting import TakenCall, ToolHint
from stepfleet.orchestrator.store.opening.opening import OpenStore
from stepfleet.orchestrator.store.runs.isolation_marks import TrialMarks
from stepfleet.worker.leases.call_lease import CallLease
from stepfleet.worker.leases.lease import Holding, Lease
from stepfleet.worker.ports import CallStore, Store
from stepfleet.worker.runtime.isolation.processes import Isolation, Member, Outcome
from stepfleet.worker.step import CANCELLED

Release = Callable[[float], Awaitable[None]]


class Renewed(Protocol):
    """Answer to a renewal."""

    @property
    def ours(self) -> bool:
        """Whether the lease still belongs to this worker."""


class Renewing(Protocol):
    """Renews leases."""

    async def step(self, lease: Lease) -> Renewed:
        """Renew a step's lease."""

    async def call(self, lease: CallLease) -> Renewed:
        """Renew a tool call's lease."""


class Marks(Protocol):
    """Counts what a process for suspects has died with."""

    async def died(self, hint: StepHint | ToolHint, token: str, group: int, agent: str) -> None:
        """Count the death of the process that had it, one of `group`; dispatch it again."""


class Trials:
    """Tries suspects in the processes of `isolation` (None: there are none).

    `limit` workers may be lost with work before it is suspect; `grace` is in seconds. Suspects
    wait here for their turn, under leases that are renewed, and not in anybody's queue.
    """

    def __init__(
        self,
        limit: int,
        grace: float,
        renewing: Renewing,
        marks: Marks,
        isolation: Isolation | None,
    ) -> None:
        self._limit = limit
        self._grace = grace
        self._renewing = renewing
        self._marks = marks
        self._isolation = isolation

    @classmethod
    def over(cls, opened: OpenStore, renewing: Renewing, isolation: Isolation | None) -> Self:
        """Return the trials of a worker that works over an open store."""
        marks = TrialMarks(opened.connection, opened.keys, opened.dispatch)
        settings = opened.settings
        return cls(settings.poison_limit, settings.grace, renewing, marks, isolation)

    async def tried(self, lease: Lease, store: Store) -> bool:
        """Try the claimed step elsewhere, or put it off; False where it is to be done here.

        Its process goes on under the same token. Raises `StoreError` when Redis stays out of
        reach.
        """
        claim = lease.claim
        hint = StepHint(claim.run_id, claim.step)
        release = partial(_release_step, claim, store)
        if delay := claim.losses.delay(self._limit, self._grace):
            await release(delay)
            return True
        member = self._member(lease, hint, claim)
        renew = partial(self._renewing.step, lease)
        return member is not None and await self._tried(lease, member, renew, release)

    async def tried_call(self, lease: CallLease, calls: CallStore) -> bool:
        """Try the tool call elsewhere, or put it off; as `tried` does with steps."""
        taken = lease.taken
        release = partial(_release_call, lease, calls)
        if delay := taken.losses.delay(self._limit, self._grace):
            await release(delay)
            return True
        member = self._member(lease, taken.hint, taken)
        renew = partial(self._renewing.call, lease)
        return member is not None and await self._tried(lease, member, renew, release)

    async def aclose(self) -> None:
        """End all processes for suspects; what they have is handed back."""
        if self._isolation:
            await self._isolation.aclose()

    def _member(
        self, lease: Holding, hint: StepHint | ToolHint, work: Claim | TakenCall
    ) -> Member | None:
        found = work.losses.suspicion(self._limit)
        if self._isolation is None or found.stance is not Stance.SUSPECT:
            return None

        async def died(group: int) -> None:
            lease.settle()  # what is dispatched again may come to this worker
            await self._marks.died(hint, work.token, group, work.config.name)

        return Member(hint, work.token, Suspect(found.most, found.by_tools), died)

    async def _tried(
        self,
        lease: Holding,
        member: Member,
        renew: Callable[[], Awaitable[Renewed]],
        release: Release,
    ) -> bool:
        isolation = self._isolation
        assert isolation is not None  # noqa: S101 - or there would be no member
        try:
            outcome = await isolation.join(member)
        except asyncio.CancelledError as cancelled:
            by = lease.broken_off_by(cancelled)
            lease.settle()
            if not await isolation.leave(member, by) and by is not Interruption.LEASE_LOST:
                await release(self._grace if by.from_outside else 0.0)
            return True
        if outcome is Outcome.NO_ROOM:
            await release(self._grace)
            return True
        if outcome is Outcome.NOT_STARTED:
            return not (await renew()).ours
        return True


async def _release_step(claim: Claim, store: Store, delay: float) -> None:
    verdict = Verdict(Move.RELEASE, claim.state, delay=delay)
    committed = await store.commit(claim, verdict, Events([]))
    if committed.wanted:
        state = claim.state.model_copy(update={"stop_requested": CANCELLED})
        await store.commit(claim, replace(verdict, state=state), Events([]))


async def _release_call(lease: CallLease, calls: CallStore, delay: float) -> None:
    await calls.leave(lease.taken.hint, lease.taken.token, delay=delay, started=False)
