"""`stepfleet bench`: starts Redis, a simulated provider and workers, measures, and ends them."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

from stepfleet.orchestrator.cli.bench.agents import bench
from stepfleet.orchestrator.cli.bench.figures import Figures, estimate
from stepfleet.orchestrator.cli.bench.measurement import Measuring
from stepfleet.orchestrator.cli.bench.views import as_data, as_tables
from stepfleet.orchestrator.cli.bench.workload import Workload, planned
from stepfleet.orchestrator.cli.local.fleet import FleetPlan, supervisor_of
from stepfleet.orchestrator.cli.local.process import Child
from stepfleet.orchestrator.cli.local.simulation import Simulated, start_simulation
from stepfleet.orchestrator.cli.local.worker_command import simulated_environment
from stepfleet.orchestrator.cli.setup.data_folder import DataFolder, local_redis
from stepfleet.orchestrator.cli.setup.open_files import raise_open_files_limit
from stepfleet.orchestrator.cli.terminal.exit_codes import INTERRUPTED, code_of
from stepfleet.orchestrator.cli.terminal.output import notice, print_json, screen
from stepfleet.orchestrator.cli.terminal.signals import Interrupts, until_asked
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.settings.settings import Settings

AGENTS = "stepfleet.orchestrator.cli.bench.agents"
RULES = "stepfleet.worker.testing.workload:rules"
RETENTION = 600
"""Seconds for which a named Redis keeps the benchmark's runs."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What the user asked `bench` for. `concurrent` are the numbers of runs to estimate for."""

    load: Workload
    workers: int
    slots: int | None
    faults: float
    concurrent: tuple[int, ...]
    json: bool


def bench_fleet(plan: BenchPlan) -> int:
    """Measure, and print; return the exit code.

    Raises `ConfigurationError` where a Redis is named on which workers run already.
    """
    raise_open_files_limit()
    with tempfile.TemporaryDirectory(prefix="stepfleet-bench-") as place:
        folder = DataFolder.prepare(Path(place))
        with local_redis(folder) as named:
            settings = named.model_copy(update={"retention": RETENTION})
            figures = asyncio.run(_bench(plan, settings, folder))
    if figures is None:
        notice("Interrupted: nothing was measured.")
        return INTERRUPTED
    figures = replace(figures, estimates=tuple(estimate(figures, runs) for runs in plan.concurrent))
    if plan.json:
        print_json(as_data(figures))
    else:
        screen().print(as_tables(figures))
    return code_of(completed=figures.counts.completed, total=figures.counts.runs)


async def _bench(plan: BenchPlan, settings: Settings, folder: DataFolder) -> Figures | None:
    interrupts = Interrupts()
    with interrupts.heard():
        async with (
            _provider(plan, folder) as (provider, extra),
            AsyncFleet(settings=settings, brings=[bench.name]) as fleet,
        ):
            await _refuse_company(fleet)
            slots = plan.slots or settings.slots
            workers = supervisor_of(
                FleetPlan(AGENTS, plan.workers, slots), settings, folder, extra, notice
            )
            interrupts.before_leaving_at_once(workers.kill)
            try:
                await workers.start()
                measuring = Measuring(fleet, settings, provider.pid)
                return await until_asked(
                    _measured(plan, measuring, slots), interrupts.asked, workers.watch()
                )
            finally:
                await workers.stop()


async def _measured(plan: BenchPlan, measuring: Measuring, slots: int) -> Figures:
    notice(f"Starting {plan.workers} worker(s)")
    await measuring.until_ready(plan.workers)
    runs = planned(plan.load)
    notice(f"Measuring {plan.load.runs:,} runs of {plan.load.steps} steps")
    return await measuring.measure(runs, slots)


@contextlib.asynccontextmanager
async def _provider(
    plan: BenchPlan, folder: DataFolder
) -> AsyncIterator[tuple[Child, dict[str, str]]]:
    """Run the simulated provider; give it, and what workers need to use it."""
    child, url = await start_simulation(Simulated(RULES, faults=plan.faults), folder)
    try:
        yield child, {**simulated_environment(url), "STEPFLEET_RETENTION": str(RETENTION)}
    finally:
        await child.stop(within=5.0)


async def _refuse_company(fleet: AsyncFleet) -> None:
    there = [worker.name for worker in (await fleet.overview()).workers if worker.alive]
    if there:
        msg = (
            f"a worker ({there[0]}) runs on this Redis, and would take the benchmark's steps: "
            "unset STEPFLEET_REDIS_URL for a private Redis, or name an empty database"
        )
        raise ConfigurationError(msg)
