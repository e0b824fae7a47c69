"""Starts what a benchmark measures as real processes, and reads their CPU time and memory."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import redis

HERE = Path(__file__).resolve().parent
DEADLINE = 60.0
LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Usage:
    """CPU seconds (user and system, children included) and resident memory in bytes."""

    cpu: float
    memory: int


def usage(pids: list[int]) -> Usage:
    """Return what processes and their children have used so far, and hold now."""
    cpu, memory = 0.0, 0
    for pid in pids:
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                cpu += times.user + times.system
                memory += process.memory_info().rss
    return Usage(cpu, memory)


@contextlib.contextmanager
def redis_server() -> Iterator[tuple[str, int]]:
    """Run a private Redis with its append-only file on; yield URL and process id."""
    from stepfleet.orchestrator.embedded import EmbeddedRedis  # noqa: PLC0415 - only here

    with (
        tempfile.TemporaryDirectory(prefix="sf-bench-") as folder,
        EmbeddedRedis.start(Path(folder)) as server,
        redis.Redis.from_url(server.url) as client,
    ):
        yield server.url, int(client.info("server")["process_id"])


@contextlib.contextmanager
def model_server(latency: float) -> Iterator[str]:
    """Run the model server with the benchmark's rules; yield its base URL."""
    command = [
        *(sys.executable, "-m", "stepfleet.worker.testing"),
        *("--rules", f"{HERE / 'rules.py'}:rules", "--latency", str(latency)),
        *("--parent-pid", str(os.getpid())),
    ]
    with ended(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)) as process:
        assert process.stdout is not None  # noqa: S101 - it was asked for
        yield json.loads(process.stdout.readline())["url"]


@contextlib.contextmanager
def workers(
    count: int, environment: dict[str, str], *arguments: str, app: str = "stepfleet.worker.app"
) -> Iterator[list[int]]:
    """Run `count` Celery workers; yield their process ids as soon as all answer."""
    with contextlib.ExitStack() as running:
        log = running.enter_context(tempfile.NamedTemporaryFile("w", suffix=".log", delete=False))
        started = [
            running.enter_context(
                ended(
                    subprocess.Popen(
                        [
                            *(sys.executable, "-m", "celery", "-A", app, "worker"),
                            *("--without-gossip", "--without-mingle", "-l", "warning"),
                            *("-n", f"bench{number}@%h", *arguments),
                        ],
                        env={**os.environ, **environment},
                        cwd=HERE,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
            )
            for number in range(count)
        ]
        yield [process.pid for process in started]


@contextlib.contextmanager
def ended(process: "subprocess.Popen[str]") -> Iterator["subprocess.Popen[str]"]:
    """End a process with SIGTERM, and with SIGKILL if that does not help."""
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def until(check: "object", within: float = DEADLINE) -> float:
    """Wait until `check()` is true; return the monotonic time of that moment."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if check():  # type: ignore[operator]
            return time.monotonic()
        time.sleep(LOOK_SECONDS)
    raise TimeoutError(f"not within {within} s")
