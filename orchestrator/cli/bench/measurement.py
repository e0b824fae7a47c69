"""Runs a load on a fleet that stands, and reads what everybody used for it."""

import asyncio
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from uuid import uuid4

from redis.cluster import RedisCluster

from stepfleet.orchestrator.cli.bench.agents import bench
from stepfleet.orchestrator.cli.bench.figures import (
    Counts,
    Ended,
    Figures,
    Moment,
    Percentiles,
)
from stepfleet.orchestrator.cli.bench.process_usage import usage_of
from stepfleet.orchestrator.cli.bench.workload import (
    PlannedRun,
    ideal_seconds,
    mean_step_seconds,
    warming,
)
from stepfleet.orchestrator.cli.setup.cluster_facts import asked_cluster, infos
from stepfleet.orchestrator.cli.setup.redis_facts import client_of
from stepfleet.orchestrator.client.fleet import AsyncBatch, AsyncFleet
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.batch import BatchProgress
from stepfleet.orchestrator.records.run.results import AgentRunResult
from stepfleet.orchestrator.redis_client.urls import is_cluster
from stepfleet.orchestrator.settings.settings import Settings

READY_SECONDS = 90.0
SAMPLED_RUNS = 2000
_LOOK_SECONDS = 0.05
_SILENCE_SECONDS = 5.0
_MS = 1000


class Measuring:
    """A standing fleet to measure: its client, its settings, and the provider's process id."""

    def __init__(self, fleet: AsyncFleet, settings: Settings, model_pid: int) -> None:
        self._fleet = fleet
        self._settings = settings
        self._model_pid = model_pid
        self._pids: list[int] = []

    async def until_ready(self, workers: int) -> None:
        """Wait until so many workers have reported; let them do a few steps.

        Raises `ConfigurationError` where they do not come.
        """
        deadline = time.monotonic() + READY_SECONDS
        while len(self._pids) < workers:
            if time.monotonic() > deadline:
                msg = f"only {len(self._pids)} of {workers} workers are there; start fewer"
                raise ConfigurationError(msg)
            await asyncio.sleep(_LOOK_SECONDS)
            seen = (await self._fleet.overview()).workers
            self._pids = [int(pid) for one in seen if one.alive for pid in _own(one.name)]
        await _ended(await self._submit(warming(workers)))

    async def measure(self, runs: Sequence[PlannedRun], slots: int) -> Figures:
        """Run the load; from its submission's begin to its last run's end."""
        before = await self._moment()
        batch = await self._submit(runs)
        progress = await _ended(batch)
        after = await self._moment()
        ended = await _sampled(batch, {one.name: one for one in runs})
        wall = after.at - before.at
        steps = max(1, progress.steps)
        return Figures(
            counts=Counts(progress.total, progress.completed, progress.steps, progress.lost),
            workers=len(self._pids),
            slots=slots,
            wall_seconds=wall,
            ideal_seconds=ideal_seconds(runs, slots * len(self._pids)),
            mean_step_seconds=mean_step_seconds(runs),
            step_seconds=Percentiles.of(step for one in ended for step in one.steps),
            added_ms=Percentiles.of(one.added * _MS for one in ended),
            worker_ms_per_step=(after.worker_cpu - before.worker_cpu) * _MS / steps,
            redis_ms_per_step=(after.redis_cpu - before.redis_cpu) * _MS / steps,
            model_ms_per_step=(after.model_cpu - before.model_cpu) * _MS / steps,
            bytes_per_worker=max(after.worker_memory, default=0),
            redis_bytes_per_run=max(0, after.redis_memory - before.redis_memory) / len(runs),
            model_share=(after.model_cpu - before.model_cpu) / wall,
        )

    async def _submit(self, runs: Sequence[PlannedRun]) -> AsyncBatch:
        return await self._fleet.submit_batch(
            [one.line() for one in runs], bench, idempotency_key=f"bench-{uuid4()}", name="bench"
        )

    async def _moment(self) -> Moment:
        info = await asyncio.to_thread(_redis_info, self._settings.store)
        working, model = usage_of(self._pids), usage_of([self._model_pid])
        return Moment(
            at=time.monotonic(),
            worker_cpu=sum(one.cpu for one in working),
            worker_memory=[one.memory for one in working],
            model_cpu=sum(one.cpu for one in model),
            redis_cpu=float(info["used_cpu_user"]) + float(info["used_cpu_sys"]),
            redis_memory=int(info["used_memory"]),
        )


async def _ended(batch: AsyncBatch) -> BatchProgress:
    while True:
        progress = await batch.progress()
        if progress.ended:
            return progress
        await asyncio.sleep(_LOOK_SECONDS)


async def _sampled(batch: AsyncBatch, planned: dict[str, PlannedRun]) -> list[Ended]:
    """Return the first runs that ended as planned."""
    found: list[Ended] = []
    async for result in batch.results(follow=False):
        plan = planned.get(result.line_id or "")
        if plan is not None and _as_planned(result, plan):
            found.append(_times(result, plan))
        if len(found) >= SAMPLED_RUNS:
            break
    return found


def _as_planned(result: AgentRunResult, plan: PlannedRun) -> bool:
    return result.success and not result.lost_attempts and len(result.steps) == len(plan.seconds)


def _times(result: AgentRunResult, plan: PlannedRun) -> Ended:
    first, last = result.steps[0], result.steps[-1]
    end = last.started_at + timedelta(milliseconds=last.duration_ms)
    steps = [step.duration_ms / _MS for step in result.steps]
    return Ended(steps, (end - first.started_at).total_seconds(), plan.ideal)


def _own(worker: str) -> list[int]:
    """Return the process id of a worker `host:pid` of this machine; nothing for others."""
    host, _, pid = worker.rpartition(":")
    return [int(pid)] if host == socket.gethostname() and pid.isdigit() else []


def _used_by_all(client: RedisCluster) -> dict[str, Any]:
    used = infos(client, "cpu", "memory")
    names = ("used_cpu_user", "used_cpu_sys", "used_memory")
    return {name: sum(float(one[name]) for one in used) for name in names}


def _redis_info(url: str) -> dict[str, Any]:
    if is_cluster(url):
        return asked_cluster(url, _used_by_all, seconds=_SILENCE_SECONDS)
    with client_of(url) as client:
        return {**client.info("cpu"), **client.info("memory")}
