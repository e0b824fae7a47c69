"""The workers of a chaos run: killed, frozen and restarted, and how soon their runs go on.

Reads from Redis only which runs a worker holds, by the raw records.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Self

import psutil
import redis
from support.deadlines import wait_until
from support.workers.fleet_workers import FleetWorker
from support.workers.frozen import freeze

_PAUSE_SECONDS = 0.05
Held = tuple[str, str]


@dataclass
class Recovery:
    """Runs that a worker held when it was hit, and when each was in other hands or had ended."""

    struck: float
    held: set[Held]
    seconds: list[float] = field(default_factory=list)


class RecoveryWatch:
    """Measures from the outside how long runs wait for another worker."""

    def __init__(self, url: str) -> None:
        self.recoveries: list[Recovery] = []
        self._client = redis.Redis.from_url(url, decode_responses=True)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(timeout=30)
        self._client.close()

    def held_by(self, name: str, pids: Iterable[int]) -> set[Held]:
        """Return header key and token of the runs that a worker and its processes hold."""
        endings = (name, *(f":{pid}" for pid in pids))
        keys = self._active()
        asked = self._client.pipeline(transaction=False)
        for key in keys:
            asked.hmget(key, "token", "worker")
        found = zip(keys, asked.execute(), strict=True)
        return {
            (key, token) for key, (token, worker) in found if token and worker.endswith(endings)
        }

    def struck(self, held: set[Held]) -> None:
        """Begin to wait for these runs."""
        self.recoveries.append(Recovery(time.monotonic(), held))

    @property
    def waits(self) -> list[float]:
        """Seconds that each run waited, those of runs in flight only."""
        return sorted(one for recovery in self.recoveries for one in recovery.seconds)

    def _active(self) -> list[str]:
        asked = self._client.pipeline(transaction=False)
        for shard in range(16):
            asked.zrange(f"sf:{{s{shard:02d}}}:due", 0, -1)
        return [
            f"sf:{{s{shard:02d}}}:run:{run_id}"
            for shard, ids in enumerate(asked.execute())
            for run_id in ids
        ]

    def _run(self) -> None:
        while not self._ended.wait(_PAUSE_SECONDS):
            for recovery in list(self.recoveries):
                if recovery.held:
                    self._look(recovery)

    def _look(self, recovery: Recovery) -> None:
        waiting = sorted(recovery.held)
        asked = self._client.pipeline(transaction=False)
        for key, _ in waiting:
            asked.hget(key, "token")
        try:
            tokens = asked.execute()
        except (redis.ConnectionError, redis.TimeoutError):
            return
        for (key, token), now in zip(waiting, tokens, strict=True):
            if now != token:
                recovery.held.discard((key, token))
                recovery.seconds.append(time.monotonic() - recovery.struck)


class ChaosWorkers:
    """Workers, each replaced where it died. `launch(name)` starts one without waiting."""

    def __init__(self, launch: Callable[[str], FleetWorker], size: int) -> None:
        self._launch_named = launch
        self._births = count()
        self.kills = 0
        self.killed_with_work = 0
        self.workers = {f"w{n}": self._launch(f"w{n}") for n in range(size)}
        self.frozen: set[str] = set()

    def _launch(self, name: str) -> FleetWorker:
        return self._launch_named(f"{name}-{next(self._births)}")

    def await_one(self, within: float = 30) -> None:
        """Return when a worker consumes."""
        wait_until(lambda: any(map(self._is_up, self.workers)), within=within, what="a worker")

    def kill(self, name: str, watch: RecoveryWatch) -> None:
        """End a worker and its children by SIGKILL and start another in its place."""
        worker = self.workers[name]
        victims = processes(worker)
        held = _held(watch, self.workers[name].name, victims)
        for process in victims:
            process.kill()
        worker.wait()
        watch.struck(held)
        self.kills += 1
        self.killed_with_work += bool(held)
        self.workers[name] = self._launch(name)

    def freeze(self, name: str, seconds: float, watch: RecoveryWatch) -> None:
        """Stop a worker in its tracks, and let it go on after `seconds`."""
        victims = processes(self.workers[name])
        held = _held(watch, self.workers[name].name, victims)
        self.frozen.add(name)
        for process in victims:
            freeze(process.pid)
        watch.struck(held)
        threading.Timer(seconds, self._thaw, (name, victims)).start()

    def roll(self) -> None:
        """Restart all workers, one after the other, by SIGTERM."""
        for name, worker in list(self.workers.items()):
            if name in self.frozen:
                continue
            worker.signal(signal.SIGTERM)
            worker.wait(within=30)
            self.workers[name] = self._launch(name)

    def steady(self) -> list[str]:
        """Return the workers that consume: the ones worth hitting."""
        return [name for name in self.workers if name not in self.frozen and self._is_up(name)]

    def stop(self) -> list[int]:
        """Stop all by SIGTERM and return their exit codes."""
        for worker in self.workers.values():
            worker.signal(signal.SIGTERM)
        return [worker.wait(within=40) for worker in self.workers.values()]

    def _is_up(self, name: str) -> bool:
        worker = self.workers[name]
        assert worker.exit_code is None, f"{name} ended by itself:\n{worker.log[-3000:]}"
        return f"{worker.name} ready." in worker.log

    def _thaw(self, name: str, victims: list[psutil.Process]) -> None:
        for process in victims:
            process.resume()
        self.frozen.discard(name)


def processes(worker: FleetWorker) -> list[psutil.Process]:
    """Return a worker's process and its children."""
    parent = psutil.Process(worker.pid)
    return [parent, *parent.children(recursive=True)]


def _held(watch: RecoveryWatch, name: str, victims: list[psutil.Process]) -> set[Held]:
    try:
        return watch.held_by(name, (process.pid for process in victims))
    except (redis.ConnectionError, redis.TimeoutError):
        return set()
