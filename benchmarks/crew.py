"""Workers that a measurement kills and replaces; what they hold, and what they leave behind."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import redis
from processes import HERE, ended, until, worker_command

from stepfleet.orchestrator.store.keys import Keys

APP = "stepfleet.worker.app"
PAGE = 500
DRAIN_SECONDS = 180.0
FIELDS = ("token", "worker", "status", "step")


@dataclass
class Crew:
    """Worker processes of one fleet; `log` gets what all of them say."""

    environment: Mapping[str, str]
    running: contextlib.ExitStack
    log: IO[str]
    workers: list["subprocess.Popen[str]"] = field(default_factory=list)
    started: int = 0

    def start(self, count: int = 1) -> None:
        """Start so many more, ready or not."""
        for _ in range(count):
            self.started += 1
            process = subprocess.Popen(
                worker_command(APP, f"crew{self.started}"),
                env={**os.environ, **self.environment},
                cwd=HERE,
                stdout=self.log,
                stderr=subprocess.STDOUT,
                text=True,
            )
            self.workers.append(self.running.enter_context(ended(process)))

    def kill(self, worker: "subprocess.Popen[str]") -> None:
        """End a worker with SIGKILL."""
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        self.workers.remove(worker)

    def logged(self) -> list[str]:
        """Return the workers' log lines so far."""
        self.log.flush()
        return Path(self.log.name).read_text(encoding="utf-8").splitlines()


@contextlib.contextmanager
def crew(environment: Mapping[str, str]) -> Iterator[Crew]:
    """Yield a crew without workers yet; end those that live at the end."""
    with (
        tempfile.NamedTemporaryFile("w+", suffix=".log") as log,
        contextlib.ExitStack() as running,
    ):
        yield Crew(environment, running, log)


def name_of(worker: "subprocess.Popen[str]") -> str:
    """Return the name under which a worker holds runs: that of its node."""
    command = list(map(str, worker.args)) if isinstance(worker.args, list) else []
    return command[command.index("-n") + 1].replace("%h", socket.gethostname())


def drained(worker: "subprocess.Popen[str]", look: Callable[[], object] = lambda: None) -> float:
    """Stop a worker by SIGTERM; return the seconds until its end, during which `look` is called.

    Raises `RuntimeError` where it ends with an error.
    """
    began = time.monotonic()
    worker.terminate()
    until(lambda: (look(), worker.poll() is not None)[1], within=DRAIN_SECONDS)
    if worker.returncode:
        raise RuntimeError(f"a worker ended with {worker.returncode} after SIGTERM")
    return time.monotonic() - began


def headers(store: redis.Redis, runs: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return what the runs' headers say of who holds them, by run id."""
    keys, found = Keys(), {}
    runs = list(runs)
    for at in range(0, len(runs), PAGE):
        page = runs[at : at + PAGE]
        pipeline = store.pipeline(transaction=False)
        for run in page:
            pipeline.hmget(keys.run(run), FIELDS)
        for run, values in zip(page, pipeline.execute(), strict=True):
            texts = [(one or b"").decode() for one in values]
            found[run] = dict(zip(FIELDS, texts, strict=True))
    return found


def held(store: redis.Redis, runs: Iterable[str]) -> dict[str, list[str]]:
    """Return the runs that are leased, by the name of their worker."""
    by_worker: dict[str, list[str]] = {}
    for run, header in headers(store, runs).items():
        if header["token"]:
            by_worker.setdefault(header["worker"], []).append(run)
    return by_worker


def calls_of(log: Path) -> list[dict[str, Any]]:
    """Return the model server's log: run, turn, and when each call came and was answered."""
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line]


def effects_of(file: Path) -> dict[str, int]:
    """Return what the tool of `upgrade_agent.py` did: all effects, and those above one per call."""
    keys = Counter(file.read_bytes().splitlines())
    return {"effects": keys.total(), "twice": keys.total() - len(keys)}


def repeated(calls: Iterable[Mapping[str, Any]]) -> int:
    """Return how many calls were made again for the same turn."""
    return sum(count - 1 for count in Counter((one["run"], one["turn"]) for one in calls).values())
