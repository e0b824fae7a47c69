"""Composes a local fleet: worker processes for an agent module, simulated models if wanted."""

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.cli.local.process import Child
from stepfleet.orchestrator.cli.local.simulation import Simulated, simulated_as, simulation
from stepfleet.orchestrator.cli.local.supervisor import Supervisor
from stepfleet.orchestrator.cli.local.worker_command import (
    WORKER,
    WorkerOptions,
    celery_arguments,
    tool_queues,
    watched_argv,
    worker_environment,
)
from stepfleet.orchestrator.cli.setup.data_folder import DataFolder
from stepfleet.orchestrator.settings.settings import Settings


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The parts of a local fleet."""

    agents: str
    workers: int
    slots: int | None = None
    simulate: Simulated | None = None

    def simulating(self, rules: str | None, latency: str | None, faults: float | None) -> Self:
        """Return the same fleet with the provider to simulate, if any.

        Raises `ConfigurationError` for latency or faults without rules.
        """
        return replace(self, simulate=simulated_as(rules, latency, faults))


@contextlib.asynccontextmanager
async def simulated(plan: FleetPlan, folder: DataFolder) -> AsyncIterator[dict[str, str]]:
    """Run the plan's simulated provider, if any; give the environment of workers that use it."""
    if plan.simulate is None:
        yield {}
        return
    async with simulation(plan.simulate, folder) as (_, environment):
        yield environment


def supervisor_of(
    plan: FleetPlan,
    settings: Settings,
    folder: DataFolder,
    extra: Mapping[str, str],
    notice: Callable[[str], None],
    beside: Sequence[Child] = (),
) -> Supervisor:
    """Return the supervisor of the plan's workers and of the processes `beside` them, not started.

    `extra` is added to the workers' environment.
    """
    heavy = tool_queues(load_agents(plan.agents).values()) if plan.workers else ()
    queues = (settings.queue, *heavy) if heavy else ()
    workers = []
    for name in (f"worker-{number + 1}" for number in range(plan.workers)):
        options = WorkerOptions(
            plan.agents,
            slots=plan.slots,
            # The process id keeps node names apart when several commands share one Redis.
            name=f"{name}-{os.getpid()}",
            # A log that nobody watches live need not have two lines for every step.
            log_level="WARNING",
            queues=queues,
        )
        argv = watched_argv(WORKER, *celery_arguments(options))
        env = worker_environment(options, settings.store, {**os.environ, **extra})
        workers.append(Child(name, argv, env, folder.log(name)))
    return Supervisor(workers, notice, drain=settings.drain, beside=beside)
