"""One measurement of one peer: starts it and its server, speaks with its script, watches it.

CPU and memory are those of the peer's processes and of its server's, submission included; the
model server's are not. Ends at a deadline or when memory runs out, and then tells how far it came.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import psutil
from peers_catalog import Peer
from peers_services import Running, service
from peers_watch import Spent, Watch
from processes import model_server

SCRIPTS = Path(__file__).resolve().parent / "peers"
START_SECONDS = 120
ERROR, LOG_LENGTH = re.compile(r"error|exception|critical", re.IGNORECASE), 300
ENVIRONMENT = {"LANGSMITH_TRACING": "false"}
MEMORY_LEFT = 1_000_000_000


@dataclass(frozen=True)
class Setting:
    """What all peers do: `runs` times `steps`, `concurrency` at a time; seconds."""

    runs: int
    steps: int
    concurrency: int
    latency: float
    deadline: float


@dataclass(frozen=True)
class Figures:
    """One measurement. Seconds, CPU in milliseconds per step, memory in bytes.

    `calls` is what the model server answered within the time; `steps_done` at most what was
    requested. `problem` is empty for a peer that completed everything.
    """

    peer: str
    client: str
    runs: int
    steps: int
    concurrency: int
    latency: float
    wall: float | None = None
    steps_done: int = 0
    calls: int = 0
    peer_cpu_ms: float | None = None
    store_cpu_ms: float | None = None
    cpu_seconds: float = 0.0
    memory: int = 0
    problem: str = ""

    @property
    def rate(self) -> float | None:
        """Steps per second; of an unfinished measurement up to its end."""
        return self.steps_done / self.wall if self.wall and self.steps_done else None

    @property
    def cpu_ms(self) -> float | None:
        """CPU milliseconds per step, server included."""
        if self.peer_cpu_ms is None or self.store_cpu_ms is None:
            return None
        return self.peer_cpu_ms + self.store_cpu_ms


class DidNotFinishError(Exception):
    """A peer failed or ran out of time or memory; the message says which."""


def measure(peer: Peer, python: str, setting: Setting, cache: Path) -> Figures:
    """Return the figures of one measurement, or of how it failed.

    Raises `LookupError` where a server's program is missing.
    """
    requested = Figures(
        peer.name, peer.client, setting.runs, setting.steps, setting.concurrency, setting.latency
    )
    if peer.most is not None and setting.concurrency > peer.most:
        return _with(requested, problem=f"not tried above {peer.most}: {peer.why}")
    try:
        return _with_servers(peer, python, setting, cache, requested)
    except OSError as failure:
        return _with(requested, problem=f"did not start, or lost its servers: {failure}")


def _with_servers(
    peer: Peer, python: str, setting: Setting, cache: Path, requested: Figures
) -> Figures:
    with (
        model_server(setting.latency) as model,
        service(peer.service, cache) as server,
        tempfile.TemporaryDirectory(prefix="peers-") as folder,
    ):
        job = {
            "runs": setting.runs,
            "turns": setting.steps,
            "concurrency": setting.concurrency,
            "model": model,
            "client": peer.client,
            "kind": peer.kind,
            "store": server.address,
            "folder": folder,
        }
        log = Path(folder) / "log"
        command = [python, str(SCRIPTS / peer.script), json.dumps(job)]
        try:
            with _script(command, log) as process:
                found = _measured(requested, process, server, model, setting.deadline)
                return _with(found, problem=f"{found.problem}{_last(log) if found.problem else ''}")
        except DidNotFinishError as failure:
            return _with(requested, problem=f"{failure}{_last(log)}")


def _measured(
    requested: Figures,
    process: "subprocess.Popen[str]",
    server: Running,
    model: str,
    deadline: float,
) -> Figures:
    _line(process, START_SECONDS, "did not start")
    calls = _calls(model)
    with Watch([process.pid], [server.pid] if server.pid else []) as watch:
        started = time.monotonic()
        _send(process)
        problem, wall = "", None
        try:
            end = _line(process, deadline, "did not finish")
            wall = float(end["seconds"])
            if end["done"] != requested.runs:
                problem = f"only {end['done']} of {requested.runs} runs ended well"
        except DidNotFinishError as failure:
            problem = str(failure)
        wall = wall or time.monotonic() - started
        made = _calls(model) - calls
        spent = watch.spent()
    steps = min(made, requested.runs * requested.steps)
    if problem:
        problem += f" ({steps} of {requested.runs * requested.steps} steps)"
    return _figures(requested, wall, steps, made, spent, problem)


def _figures(
    requested: Figures, wall: float, steps: int, calls: int, spent: Spent, problem: str
) -> Figures:
    divided = max(steps, 1)
    return _with(
        requested,
        wall=wall,
        steps_done=steps,
        calls=calls,
        peer_cpu_ms=spent.cpu * 1000 / divided,
        store_cpu_ms=spent.store_cpu * 1000 / divided,
        cpu_seconds=spent.cpu + spent.store_cpu,
        memory=spent.memory,
        problem=problem,
    )


def _with(figures: Figures, **changes: Any) -> Figures:
    return Figures(**{**asdict(figures), **changes})


@contextlib.contextmanager
def _script(command: list[str], log: Path) -> Iterator["subprocess.Popen[str]"]:
    """Run a peer's script; end it and its children, whatever state they are in."""
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=log.parent,
            start_new_session=True,
            env={**_without_proxies(), **ENVIRONMENT},
        )
        try:
            yield process
        finally:
            _end(process)


def _without_proxies() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}


def _last(log: Path) -> str:
    """Return the last error in the log of the script and its children."""
    logged = log.read_text("utf-8", errors="replace").splitlines()
    errors = [line.strip() for line in logged if ERROR.search(line)]
    return f"; its last error: {errors[-1][-LOG_LENGTH:]}" if errors else ""


def _end(process: "subprocess.Popen[str]") -> None:
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()  # type: ignore[union-attr]
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what the script has left behind
    process.stdout.close()  # type: ignore[union-attr]


def _send(process: "subprocess.Popen[str]") -> None:
    stream: IO[str] = process.stdin  # type: ignore[assignment]
    stream.write("go\n")
    stream.flush()


def _line(process: "subprocess.Popen[str]", within: float, failed: str) -> dict[str, Any]:
    """Return the script's next JSON line."""
    stream: IO[str] = process.stdout  # type: ignore[assignment]
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.append(stream.readline()), daemon=True)
    reader.start()
    deadline = time.monotonic() + within
    while reader.is_alive():
        reader.join(timeout=0.2)
        if time.monotonic() > deadline:
            raise DidNotFinishError(f"{failed} within {within:g} s")
        if psutil.virtual_memory().available < MEMORY_LEFT:
            raise DidNotFinishError(f"{failed}: less than {MEMORY_LEFT / 1e9:g} GB of memory left")
    if not lines[0].startswith("{"):
        raise DidNotFinishError(f"{failed}: it ended by itself")
    answer: dict[str, Any] = json.loads(lines[0])
    return answer


def _calls(model: str) -> int:
    root = model.removesuffix("/v1")
    with urllib.request.urlopen(f"{root}/stats", timeout=30) as answer:  # noqa: S310 - our own
        stats = json.load(answer)
    if stats["violations"]:
        sys.stderr.write(f"the model server refused requests: {stats['violations']}\n")
    return int(stats["requests"]) - int(stats["in_flight"])
