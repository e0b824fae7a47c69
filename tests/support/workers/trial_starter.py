"""A worker's part in a trial, as a process of its own that a test can end: claim, and start.

Arguments: the store's address, a file of agents, an agent's name, a run, and the lease in seconds.
"""

import asyncio
import itertools
import sys
import time
from collections.abc import Callable

from support.deadlines import until
from support.runs.scripted_steps import Hands
from support.runs.stored_runs import Bench, bench

from stepfleet.orchestrator import Agent
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.protocol.claim import Claim, Work
from stepfleet.orchestrator.protocol.waiting import TakenCall
from stepfleet.worker.leases.lease import Leases
from stepfleet.worker.leases.renewal import renewing
from stepfleet.worker.ports import Ports
from stepfleet.worker.runtime.isolation import IsolatedProcesses, Isolation

LIMIT = 3


def trials(
    desk: Bench,
    *command: str,
    limit: int = LIMIT,
    grace: float = 1.0,
    processes: int = 4,
    draining: Callable[[], bool] = lambda: False,
) -> Isolation:
    """Return an isolation whose processes are started by `command`, or as workers do."""
    isolated = IsolatedProcesses(
        desk.opened.marks, command, limit=processes, confirm=0.1, draining=draining
    )
    return Isolation(limit, grace, renewing(desk.steps), isolated)


def ports(desk: Bench) -> Ports:
    """Return what a worker would give suspects back by."""
    return Hands(desk, Agent("plain", model="openai:any")).ports()


async def claimed(desk: Bench, run_id: str) -> Claim:
    """Take a run's first step, as soon as nobody holds it."""

    async def taken() -> Claim | None:
        claim = await desk.steps.claim(Work(run_id, 0), desk.token())
        return claim if isinstance(claim, Claim) else None

    claim = await until(taken, within=60)
    assert claim is not None
    return claim


async def call_taken(desk: Bench, run_id: str, index: int) -> TakenCall:
    """Take a call of a run's first step, as soon as nobody holds it."""

    async def taken() -> TakenCall | None:
        found = await desk.steps.calls.take(Work(run_id, 0, index), desk.token())
        return found if isinstance(found, TakenCall) else None

    found = await until(taken, within=60)
    assert found is not None
    return found


async def main(url: str, file: str, name: str, run_id: str, lease: str) -> None:
    """Have the run's first step executed elsewhere."""
    async with bench(url, load_agents(file)[name], lease=float(lease), grace=0.2) as desk:
        desk.tokens = itertools.count(1000)  # those of the test are below
        with Leases(time.monotonic).hold(await claimed(desk, run_id)) as held:
            await trials(desk).takes(held, ports(desk))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
