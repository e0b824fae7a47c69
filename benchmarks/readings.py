"""Readings of a running fleet: CPU, memory, and Redis's counters; and the cost of a load.

`total_commands_processed` and the calls in `INFO commandstats` include the calls inside scripts
(seen with Redis 7.0: a script of ten calls counts eleven). Only clients send EVALSHA, EVAL and
FCALL, so their calls are the scripts. `total_reads_processed` counts reads from sockets: commands
that travel together are one, which makes it the round trips.
"""

import os
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

SECTIONS = ("cpu", "memory", "stats", "commandstats")
"""The sections of `INFO` that `RedisUse.of` needs."""

_SCRIPTS = ("cmdstat_evalsha", "cmdstat_eval", "cmdstat_fcall")
_MS = 1000
_KIB = 1024
_FIELDS_BEFORE_CPU = 11
"""Fields of /proc/PID/stat between the command's closing bracket and the user time."""


@dataclass(frozen=True, slots=True)
class RedisUse:
    """Redis's CPU seconds and counters since its start; memory without its clients, in bytes."""

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
            memory=int(total("used_memory") - total("mem_clients_normal")),
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


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """CPU seconds since the start (user and system), and resident memory in bytes."""

    cpu: float
    memory: int


def usage_of(pids: Iterable[int]) -> list[ProcessUsage]:
    """Return what each process has used; those that are gone are left out."""
    known = list(pids)
    if Path("/proc/self/stat").exists():
        found = [_from_proc(pid) for pid in known]
        return [one for one in found if one is not None]
    return _from_ps(known)


def peak_memory(pid: int) -> int:
    """Return the most resident memory of a process so far, in bytes; what it has now on macOS."""
    status = Path(f"/proc/{pid}/status")
    if status.exists():
        (line,) = (line for line in status.read_text("ascii").splitlines() if "VmHWM" in line)
        return int(line.split()[1]) * _KIB
    return sum(one.memory for one in usage_of([pid]))


def _from_proc(pid: int) -> ProcessUsage | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("ascii", errors="replace")
        pages = int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1])
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    ticks = int(fields[_FIELDS_BEFORE_CPU]) + int(fields[_FIELDS_BEFORE_CPU + 1])
    return ProcessUsage(ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE"))


def _from_ps(pids: list[int]) -> list[ProcessUsage]:
    listed = ",".join(map(str, pids))
    done = subprocess.run(
        ["ps", "-o", "time=,rss=", "-p", listed],  # noqa: S607 - the system's own
        capture_output=True,
        text=True,
        check=False,
    )
    rows = [line.split() for line in done.stdout.splitlines() if line.strip()]
    return [ProcessUsage(seconds_in(time), int(memory) * _KIB) for time, memory in rows]


def seconds_in(text: str) -> float:
    """Return the seconds of a time as `ps` writes it: `0:01.25`, `1:02:03`, `2-01:02:03`. Pure."""
    days, dash, rest = text.rpartition("-")
    seconds = 0.0
    for part in rest.split(":"):
        seconds = seconds * 60 + float(part)
    return seconds + (int(days) * 86_400 if dash else 0)
