"""Readings of a running fleet: CPU, memory, and Redis's counters; and the cost of a load.

`total_commands_processed` and the calls in `INFO commandstats` include the calls inside scripts
(seen with Redis 7.0: a script of ten calls counts eleven). Only clients send EVALSHA, EVAL and
FCALL, so their calls are the scripts. `total_reads_processed` counts reads from sockets: commands
that travel together are one, which makes it the round trips.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from stepfleet.orchestrator.cli.bench.process_usage import usage_of

SECTIONS = ("cpu", "memory", "stats", "commandstats")
"""The sections of `INFO` that `RedisUse.of` needs."""

_SCRIPTS = ("cmdstat_evalsha", "cmdstat_eval", "cmdstat_fcall")
_MS = 1000


@dataclass(frozen=True, slots=True)
class RedisUse:
    """Redis's CPU seconds and counters since its start, and its memory in bytes."""

    cpu: float
    memory: int
    commands: int
    scripts: int
    reads: int

    @classmethod
    def of(cls, servers: Sequence[Mapping[str, Any]]) -> Self:
        """Return the sums over servers (a cluster's masters), from the `SECTIONS` of each."""

        def total(*names: str) -> float:
            return sum(float(one.get(name, 0)) for one in servers for name in names)

        calls = (one[name]["calls"] for one in servers for name in _SCRIPTS if name in one)
        return cls(
            cpu=total("used_cpu_user", "used_cpu_sys"),
            memory=int(total("used_memory")),
            commands=int(total("total_commands_processed")),
            scripts=sum(map(int, calls)),
            reads=int(total("total_reads_processed")),
        )


@dataclass(frozen=True, slots=True)
class Reading:
    """Seconds of a steady clock, and what all parties have used by then; memory in bytes."""

    at: float
    worker_cpu: float
    worker_memory: Sequence[int]
    model_cpu: float
    redis: RedisUse

    @classmethod
    def now(
        cls, servers: Sequence[Mapping[str, Any]], workers: Iterable[int], models: Iterable[int]
    ) -> Self:
        """Return a reading of Redis's `servers` (`INFO`) and of processes by their ids."""
        working = usage_of(workers)
        return cls(
            at=time.monotonic(),
            worker_cpu=sum(one.cpu for one in working),
            worker_memory=[one.memory for one in working],
            model_cpu=sum(one.cpu for one in usage_of(models)),
            redis=RedisUse.of(servers),
        )


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of `steps` steps: seconds, CPU in ms per step, Redis's work per step.

    `round_trips` are reads from sockets by Redis, `scripts` its scripts called by clients,
    `commands` all commands with those inside scripts. `memory` is in bytes per worker at the end,
    `redis_memory` in bytes per step.
    """

    steps: int
    wall: float
    worker_ms: float
    redis_ms: float
    model_ms: float
    round_trips: float
    scripts: float
    commands: float
    memory: int
    redis_memory: float

    @classmethod
    def between(cls, before: Reading, after: Reading, steps: int) -> Self:
        """Return the cost of the steps between two readings."""
        used, earlier = after.redis, before.redis
        return cls(
            steps=steps,
            wall=after.at - before.at,
            worker_ms=(after.worker_cpu - before.worker_cpu) * _MS / steps,
            redis_ms=(used.cpu - earlier.cpu) * _MS / steps,
            model_ms=(after.model_cpu - before.model_cpu) * _MS / steps,
            round_trips=(used.reads - earlier.reads) / steps,
            scripts=(used.scripts - earlier.scripts) / steps,
            commands=(used.commands - earlier.commands) / steps,
            memory=sum(after.worker_memory) // max(1, len(after.worker_memory)),
            redis_memory=(used.memory - earlier.memory) / steps,
        )

    @property
    def rate(self) -> float:
        """Steps per second."""
        return self.steps / self.wall
