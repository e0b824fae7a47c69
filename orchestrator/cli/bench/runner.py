"""`stepfleet bench`: starts Redis, a simulated provider and workers, measures, and ends them."""

import asyncio
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from stepfleet.orchestrator.cli.bench.agents import bench
from stepfleet.orchestrator.cli.bench.figures import Figures, estimate
from stepfleet.orchestrator.cli.bench.measurement import Measurement
from stepfleet.orchestrator.cli.bench.views import as_data, as_tables
from stepfleet.orchestrator.cli.bench.workload import Workload
from stepfleet.orchestrator.cli.local.fleet import FleetPlan, supervisor_of
from stepfleet.orchestrator.cli.local.simulation import Simulated, simulation
from stepfleet.orchestrator.cli.setup.data_folder import DataFolder, local_redis
from stepfleet.orchestrator.cli.setup.open_files import raise_open_files_limit
from stepfleet.orchestrator.cli.terminal.exit_codes import INTERRUPTED, code_of
from stepfleet.orchestrator.cli.terminal.output import notice, print_either
from stepfleet.orchestrator.cli.terminal.signals import Interrupts, until_interrupted
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.settings.settings import Settings

AGENTS = "stepfleet.orchestrator.cli.bench.agents"
RULES = "stepfleet.worker.testing.scripted:rules"
RETENTION = 600
"""Seconds for which a configured Redis keeps the benchmark's runs."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The load and the fleet to measure, and the numbers of concurrent runs to estimate for."""

    load: Workload
    workers: int
    slots: int | None
    faults: float
    concurrent: tuple[int, ...]


def bench_fleet(plan: BenchPlan, *, json: bool) -> int:
    """Measure, and print; return the exit code.

    Raises `ConfigurationError` where the configured Redis already has workers.
    """
    raise_open_files_limit()
    with tempfile.TemporaryDirectory(prefix="stepfleet-bench-") as place:
        folder = DataFolder.prepare(Path(place))
        with local_redis(folder.root) as configured:
            settings = configured.model_copy(update={"retention": RETENTION})
            figures = asyncio.run(_bench(plan, settings, folder))
    if figures is None:
        notice("Interrupted: nothing was measured.")
        return INTERRUPTED
    figures = replace(figures, estimates=tuple(estimate(figures, runs) for runs in plan.concurrent))
    print_either(figures, as_tables, json=json, as_data=as_data)
    return code_of(completed=figures.counts.completed, total=figures.counts.runs)


async def _bench(plan: BenchPlan, settings: Settings, folder: DataFolder) -> Figures | None:
    interrupts = Interrupts()
    with interrupts.handled():
        async with (
            simulation(Simulated(RULES, faults=plan.faults), folder) as (provider, extra),
            AsyncFleet(settings=settings, brings=[bench.name]) as fleet,
        ):
            await _refuse_other_workers(fleet)
            slots = plan.slots or settings.slots
            extra["STEPFLEET_RETENTION"] = str(RETENTION)
            workers = supervisor_of(
                FleetPlan(AGENTS, plan.workers, slots), settings, folder, extra, notice
            )
            interrupts.before_exit(workers.kill)
            try:
                await workers.start()
                notice(f"Starting {plan.workers} worker(s)")
                measurement = Measurement(fleet, settings, provider.pid)
                measured = measurement.measure(plan.load, plan.workers, slots)
                return await until_interrupted(measured, interrupts, workers.watch())
            finally:
                await workers.stop()


async def _refuse_other_workers(fleet: AsyncFleet) -> None:
    running = [worker.name for worker in (await fleet.overview()).workers if worker.alive]
    if running:
        msg = (
            f"a worker ({running[0]}) runs on this Redis, and would take the benchmark's steps: "
            "unset STEPFLEET_REDIS_URL for a private Redis, or name an empty database"
        )
        raise ConfigurationError(msg)
