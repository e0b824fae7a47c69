"""What processes spend while a measurement lasts; must not know what they do.

CPU time of children that have ended is in their parent's account, so nothing is lost between looks.
Memory is the proportional share (PSS) where the system tells it, since forked workers share most of
theirs, else resident memory; it is looked at so seldom that this costs at most a twentieth of a
core.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

SHORTEST, SHARE = 0.5, 20


@dataclass(frozen=True)
class Spent:
    """CPU seconds of the peer and of its server since the start; the highest memory in bytes."""

    cpu: float
    store_cpu: float
    memory: int


class Watch:
    """Looks at process trees from a thread; `with` starts and ends it."""

    def __init__(self, peer: list[int], store: list[int]) -> None:
        self._peer, self._store = peer, store
        self._cpu, self._store_cpu = cpu_of(peer), cpu_of(store)
        self._memory = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look_again, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def spent(self) -> Spent:
        """Return what was spent so far."""
        cpu, store_cpu = cpu_of(self._peer), cpu_of(self._store)
        self._look()
        return Spent(cpu - self._cpu, store_cpu - self._store_cpu, self._memory)

    def _look_again(self) -> None:
        pause = SHORTEST
        while not self._ended.wait(pause):
            started = time.thread_time()
            self._look()
            pause = max(SHORTEST, SHARE * (time.thread_time() - started))

    def _look(self) -> None:
        held = sum(memory_of(process) for process in _tree([*self._peer, *self._store]))
        self._memory = max(self._memory, held)


def cpu_of(pids: list[int]) -> float:
    """Return the CPU seconds of processes and all their descendants, ended ones included."""
    seconds = 0.0
    for process in _tree(pids):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def memory_of(process: psutil.Process) -> int:
    """Return a process's share of memory in bytes; none for one that has ended."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii")
        for line in text.splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(psutil.Error):
        return int(process.memory_info().rss)
    return 0


def _tree(pids: list[int]) -> Iterator[psutil.Process]:
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            parent = psutil.Process(pid)
            yield parent
            yield from parent.children(recursive=True)
