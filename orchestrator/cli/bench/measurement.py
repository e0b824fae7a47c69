"""Runs a load on a running fleet, and reads the CPU and memory of all parties."""

import asyncio
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from uuid import uuid4

from stepfleet.orchestrator.cli.bench.agents import bench
from stepfleet.orchestrator.cli.bench.figures import (
    Counts,
    Ended,
    Figures,
    Percentiles,
)
from stepfleet.orchestrator.cli.bench.readings import SECTIONS, Cost, Reading
from stepfleet.orchestrator.cli.bench.workload import (
    PlannedRun,
    Workload,
    ideal_seconds,
    mean_step_seconds,
    planned,
    warming,
)
from stepfleet.orchestrator.cli.terminal.output import notice
from stepfleet.orchestrator.client.fleet import AsyncBatch, AsyncFleet
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.batch import BatchProgress
from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.orchestrator.store.fleet.servers import infos, query

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
