"""CPU time and memory of processes of this machine, by what the system itself tells."""

import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_KIB = 1024
_FIELDS_BEFORE_CPU = 11
"""Fields of /proc/PID/stat between the command's closing bracket and the user time."""


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
    done = subprocess.run(  # noqa: S603 - numbers only
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
