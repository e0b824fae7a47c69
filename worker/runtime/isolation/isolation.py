"""Suspects, which may have ended their workers, are executed in isolated processes.

Decides which work is isolated, and what is delayed first; `suspicion` decides what losses mean.
Knows nothing of what a step or a tool call does.
"""

import asyncio
from functools import partial

from stepfleet.orchestrator.protocol.attempt import Interruption
from stepfleet.orchestrator.protocol.claim import Stance, Suspect
from stepfleet.orchestrator.store.runs.steps import IsolationMarks
from stepfleet.worker.leases.lease import Lease, Renew
from stepfleet.worker.ports import Ports
from stepfleet.worker.runtime.isolation.processes import IsolatedProcesses, Job, Outcome
from stepfleet.worker.step import release


class Isolation:
    """Has suspects executed by `processes` (None: there are none).

    `limit` workers may be lost with work before it is suspect; `grace` is in seconds. Suspects
    wait here for their turn, under leases that are renewed, and not in a queue.
    """

    def __init__(
        self,
        limit: int,
        grace: float,
        renew: Renew,
        marks: IsolationMarks,
        processes: IsolatedProcesses | None,
    ) -> None:
        self._limit = limit
        self._grace = grace
        self._renew = renew
        self._marks = marks
        self._processes = processes

    async def takes(self, lease: Lease, ports: Ports) -> bool:
        """Execute the work elsewhere, or delay it; False where it is to be done here.

        The isolated process goes on under the same token. Raises `StoreError` when Redis stays
        out of reach.
        """
        work = lease.work
        if delay := work.losses.delay(self._limit, self._grace):
            await release(work, ports, delay)
            return True
        found = work.losses.suspicion(self._limit)
        if self._processes is None or found.stance is not Stance.SUSPECT:
            return False
        suspect = Suspect(found.most, found.by_tools)
        job = Job(work.hint, work.token, suspect, partial(self._died, lease))
        try:
            outcome = await self._processes.join(job)
        except asyncio.CancelledError as cancelled:
            by = lease.interrupted_by(cancelled)
            lease.settle()
            begun = await self._processes.leave(job, by)
            if not begun and by is not Interruption.LEASE_LOST:
                await release(work, ports, self._grace if by.from_outside else 0.0)
            return True
        if outcome is Outcome.NO_ROOM:
            await release(work, ports, self._grace)
        if outcome is Outcome.NOT_STARTED:
            return not (await self._renew(lease)).ours
        return True

    async def aclose(self) -> None:
        """End all isolated processes, which hand back their work."""
        if self._processes:
            await self._processes.aclose()

    async def _died(self, lease: Lease, group: int) -> None:
        lease.settle()  # what is dispatched again may come to this worker
        work = lease.work
        await self._marks.died(work.hint, work.token, group, work.config.name)
