"""Puts a local fleet together: worker processes for an agent module, simulated models if asked."""

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.cli.local.process import Child
from stepfleet.orchestrator.cli.local.queues import tool_queues
from stepfleet.orchestrator.cli.local.simulation import Simulated, start_simulation
from stepfleet.orchestrator.cli.local.supervisor import Supervisor
from stepfleet.orchestrator.cli.local.worker_command import (
    WORKER,
    WorkerOptions,
    celery_arguments,
    leashed_argv,
    simulated_environment,
    worker_environment,
)
from stepfleet.orchestrator.cli.setup.data_folder import DataFolder
from stepfleet.orchestrator.settings.settings import Settings


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What a local fleet consists of."""

    agents: str
    workers: int
    slots: int | None = None
    simulate: Simulated | None = None


@contextlib.asynccontextmanager
async def simulated(plan: FleetPlan, folder: DataFolder) -> AsyncIterator[dict[str, str]]:
    """Run the simulated provider that the plan asks for; give what workers need to use it."""
    if plan.simulate is None:
        yield {}
        return
    server, base_url = await start_simulation(plan.simulate, folder)
    try:
        yield simulated_environment(base_url)
    finally:
        await server.stop(within=5.0)


def supervisor_of(
    plan: FleetPlan,
    settings: Settings,
    folder: DataFolder,
    extra: dict[str, str],
    say: Callable[[str], None],
    beside: Sequence[Child] = (),
) -> Supervisor:
    """Return the supervisor of the plan's workers and of what runs `beside` them; starts none.

    `extra` goes into the workers' environment.
    """
    heavy = tool_queues(load_agents(plan.agents).values())
    queues = (settings.queue, *heavy) if heavy else ()
    workers = [
        _worker(plan, settings, folder, extra, number, queues) for number in range(plan.workers)
    ]
    return Supervisor([*workers, *beside], say, drain=settings.drain)


def _worker(
    plan: FleetPlan,
    settings: Settings,
    folder: DataFolder,
    extra: dict[str, str],
    number: int,
    queues: tuple[str, ...],
) -> Child:
    name = f"worker-{number + 1}"
    # The process id keeps node names apart when several commands share one Redis.
    # A log that nobody watches live need not have two lines for every step.
    options = WorkerOptions(
        plan.agents,
        slots=plan.slots,
        name=f"{name}-{os.getpid()}",
        log_level="WARNING",
        queues=queues,
    )
    argv = leashed_argv(WORKER, *celery_arguments(options))
    env = worker_environment(options, settings.store, {**os.environ, **extra})
    return Child(name, argv, env, folder.log(name))
