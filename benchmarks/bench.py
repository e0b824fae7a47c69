"""What a fleet costs on this machine, and how many workers more concurrent runs would need.

python benchmarks/bench.py --runs 500 --steps 5 --latency p50=1,p99=8 --concurrent 10000

With a simulated provider: no key, no network. Uses a private Redis, or the one in
STEPFLEET_REDIS_URL if it has no workers. Latencies: 0.5 (always), 0.2-1.5 (evenly), p50=1,p99=8
(log-normal); with ,tail=0.02:30 that share takes 30 s instead.
"""

import argparse
import asyncio
import json
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

from bench_agent import bench
from bench_figures import Counts, Ended, Figures, Percentiles, as_data, as_tables, estimate
from bench_load import (
    Latencies,
    PlannedRun,
    Workload,
    ideal_seconds,
    mean_step_seconds,
    planned,
    warming,
)
from processes import HERE
from readings import SECTIONS, Cost, Reading

from stepfleet.orchestrator import (
    AgentException,
    AsyncBatch,
    AsyncFleet,
    BatchProgress,
    ConfigurationError,
)
from stepfleet.orchestrator.cli.fleet import DataFolder, local_redis
from stepfleet.orchestrator.cli.options import COMPLETED, INTERRUPTED, SOME_FAILED, USAGE
from stepfleet.orchestrator.cli.signals import Interrupts, until_interrupted
from stepfleet.orchestrator.cli.terminal import notice, screen
from stepfleet.orchestrator.cli.watchdog import raise_open_files_limit
from stepfleet.orchestrator.cli.workers import FleetPlan, Simulated, simulation, supervisor_of
from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.orchestrator.store.fleet.servers import infos, query

AGENTS = str(HERE / "bench_agent.py")
RULES = f"{AGENTS}:rules"
RETENTION = 600
"""Seconds for which a configured Redis keeps the benchmark's runs."""
CONCURRENT = (1_000, 10_000, 100_000)
READY_SECONDS = 90.0
SAMPLED_RUNS = 2000
_POLL_SECONDS = 0.05
_REPLY_SECONDS = 5.0
_MS = 1000


class Measurement:
    """A running fleet to measure: its client, its settings, and the provider's process id."""

    def __init__(self, fleet: AsyncFleet, settings: Settings, model_pid: int) -> None:
        self._fleet = fleet
        self._settings = settings
        self._model_pid = model_pid
        self._pids: list[int] = []

    async def measure(self, load: Workload, workers: int, slots: int) -> Figures:
        """Run the load on warm workers, from its submission to the end of its last run.

        Raises `ConfigurationError` where the workers do not report.
        """
        await self._warm(workers)
        runs = planned(load)
        notice(f"Measuring {load.runs:,} runs of {load.steps} steps")
        before = await self._reading()
        batch = await self._submit(runs)
        progress = await _ended(batch)
        after = await self._reading()
        ended = await _sampled(batch, {one.name: one for one in runs})
        steps = max(1, progress.steps)
        cost = Cost.between(before, after, steps)
        return Figures(
            counts=Counts(progress.total, progress.completed, progress.steps, progress.lost),
            workers=len(self._pids),
            slots=slots,
            wall_seconds=cost.wall,
            ideal_seconds=ideal_seconds(runs, slots * len(self._pids)),
            mean_step_seconds=mean_step_seconds(runs),
            step_seconds=Percentiles.of(step for one in ended for step in one.steps),
            added_ms=Percentiles.of(one.added * _MS for one in ended),
            worker_ms_per_step=cost.worker_ms,
            redis_ms_per_step=cost.redis_ms,
            model_ms_per_step=cost.model_ms,
            bytes_per_worker=max(after.worker_memory, default=0),
            redis_bytes_per_run=max(0.0, cost.redis_memory * steps) / len(runs),
            model_share=cost.model_ms * steps / _MS / cost.wall,
        )

    async def _warm(self, workers: int) -> None:
        """Wait until so many workers have reported, and let them do a few steps."""
        deadline = time.monotonic() + READY_SECONDS
        while len(self._pids) < workers:
            if time.monotonic() > deadline:
                msg = f"only {len(self._pids)} of {workers} workers have started; start fewer"
                raise ConfigurationError(msg)
            await asyncio.sleep(_POLL_SECONDS)
            seen = (await self._fleet.overview()).workers
            self._pids = [int(pid) for one in seen if one.alive for pid in _own(one.process)]
        await _ended(await self._submit(warming(workers)))

    async def _submit(self, runs: Sequence[PlannedRun]) -> AsyncBatch:
        return await self._fleet.submit_batch(
            [one.line() for one in runs], bench, idempotency_key=f"bench-{uuid4()}", name="bench"
        )

    async def _reading(self) -> Reading:
        servers = await asyncio.to_thread(
            query,
            self._settings.store,
            lambda client: infos(client, *SECTIONS),
            seconds=_REPLY_SECONDS,
        )
        return Reading.now(servers, self._pids, [self._model_pid])


async def _ended(batch: AsyncBatch) -> BatchProgress:
    while True:
        progress = await batch.progress()
        if progress.ended:
            return progress
        await asyncio.sleep(_POLL_SECONDS)


async def _sampled(batch: AsyncBatch, planned: dict[str, PlannedRun]) -> list[Ended]:
    """Return the first runs that completed as planned, without a lost attempt."""
    found: list[Ended] = []
    async for result in batch.results(follow=False):
        plan, steps = planned.get(result.line_id or ""), result.steps
        if (
            not plan
            or not result.success
            or result.lost_attempts
            or len(steps) != len(plan.seconds)
        ):
            continue
        end = steps[-1].started_at + timedelta(milliseconds=steps[-1].duration_ms)
        seconds = (end - steps[0].started_at).total_seconds()
        found.append(Ended([one.duration_ms / _MS for one in steps], seconds, plan.ideal))
        if len(found) >= SAMPLED_RUNS:
            break
    return found


def _own(worker: str) -> list[int]:
    """Return the process id of a worker `host:pid` of this machine; nothing for others."""
    host, _, pid = worker.rpartition(":")
    return [int(pid)] if host == socket.gethostname() and pid.isdigit() else []


def arguments() -> argparse.Namespace:
    """Return the parsed arguments."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--runs", "-n", type=int, default=500, help="runs, all at once")
    made.add_argument("--steps", type=int, default=5, help="model calls of each run")
    made.add_argument("--latency", default="p50=1,p99=4", help="seconds of a model call")
    made.add_argument("--tools", type=float, default=1.0, help="share of calls that call a tool")
    made.add_argument("--tool-seconds", type=float, default=0.0, help="duration of a tool call")
    made.add_argument("--faults", type=float, default=0.0, help="share of calls that are retried")
    made.add_argument("--workers", "-w", type=int, default=1, help="worker processes")
    made.add_argument("--slots", type=int, help="steps at once in each worker")
    made.add_argument(
        "--concurrent", type=int, action="append", help="estimate workers for so many runs at once"
    )
    made.add_argument("--seed", type=int, default=0, help="seed of the random load")
    made.add_argument("--json", action="store_true", help="print JSON")
    return made.parse_args()


def main() -> int:
    """Measure, and print; return the exit code."""
    given = arguments()
    latency = Latencies.parse(given.latency)
    load = Workload(given.runs, given.steps, latency, given.tools, given.tool_seconds, given.seed)
    raise_open_files_limit()
    with tempfile.TemporaryDirectory(prefix="stepfleet-bench-") as place:
        folder = DataFolder.prepare(Path(place))
        with local_redis(folder.root) as configured:
            settings = configured.model_copy(update={"retention": RETENTION})
            found = asyncio.run(measured(given, load, settings, folder))
    if found is None:
        notice("Interrupted: nothing was measured.")
        return INTERRUPTED
    estimates = tuple(estimate(found, runs) for runs in given.concurrent or CONCURRENT)
    figures = replace(found, estimates=estimates)
    if given.json:
        print(json.dumps(as_data(figures), indent=2))
    else:
        screen().print(as_tables(figures))
    return COMPLETED if figures.counts.completed == figures.counts.runs else SOME_FAILED


async def measured(
    given: argparse.Namespace, load: Workload, settings: Settings, folder: DataFolder
) -> Figures | None:
    """Start a provider and workers, measure, and end them; None after an interrupt.

    Raises `ConfigurationError` where the configured Redis already has workers.
    """
    interrupts = Interrupts()
    with interrupts.handled():
        async with (
            simulation(Simulated(RULES, faults=given.faults), folder) as (provider, extra),
            AsyncFleet(settings=settings, brings=[bench.name]) as fleet,
        ):
            await refuse_other_workers(fleet)
            slots = given.slots or settings.slots
            extra["STEPFLEET_RETENTION"] = str(RETENTION)
            plan = FleetPlan(AGENTS, given.workers, slots)
            workers = supervisor_of(plan, settings, folder, extra, notice)
            interrupts.before_exit(workers.kill)
            try:
                await workers.start()
                notice(f"Starting {given.workers} worker(s)")
                measurement = Measurement(fleet, settings, provider.pid)
                work = measurement.measure(load, given.workers, slots)
                return await until_interrupted(work, interrupts, workers.watch())
            finally:
                await workers.stop()


async def refuse_other_workers(fleet: AsyncFleet) -> None:
    """Raise `ConfigurationError` where other workers would take the benchmark's steps."""
    running = [worker.name for worker in (await fleet.overview()).workers if worker.alive]
    if running:
        msg = (
            f"a worker ({running[0]}) runs on this Redis, and would take the benchmark's steps: "
            "unset STEPFLEET_REDIS_URL for a private Redis, or name an empty database"
        )
        raise ConfigurationError(msg)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AgentException as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(USAGE)
