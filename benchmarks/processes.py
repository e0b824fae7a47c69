"""Starts what a benchmark measures as real processes."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import redis

HERE = Path(__file__).resolve().parent
DEADLINE = 60.0
LOOK_SECONDS = 0.05
LOG_TAIL = 4000


@contextlib.contextmanager
def redis_server() -> Iterator[tuple[str, int]]:
    """Run a private Redis with its append-only file on; yield URL and process id."""
    from stepfleet.orchestrator.store.embedded import EmbeddedRedis  # noqa: PLC0415 - only here

    with (
        tempfile.TemporaryDirectory(prefix="sf-bench-") as folder,
        EmbeddedRedis.start(Path(folder)) as server,
        redis.Redis.from_url(server.url) as client,
    ):
        yield server.url, int(client.info("server")["process_id"])


@dataclass(frozen=True)
class Model:
    """A running model server: its base URL and its process id."""

    url: str
    pid: int


@contextlib.contextmanager
def model_server(latency: float) -> Iterator[str]:
    """Run the model server with the benchmark's rules; yield its base URL."""
    with model(str(latency)) as served:
        yield served.url


@contextlib.contextmanager
def model(
    latency: str, log: Path | None = None, *, stub: bool = False, options: Sequence[str] = ()
) -> Iterator[Model]:
    """Run the model server; `latency` as its option has it, `log` gets a line per request.

    `stub` takes the one that costs next to nothing and checks nothing (stub.py, one latency);
    `options` are further ones of the whole server.
    """
    whole = ("-m", "stepfleet.worker.testing", "--rules", f"{HERE / 'rules.py'}:rules")
    command = [
        sys.executable,
        *((str(HERE / "stub.py"),) if stub else whole),
        *("--latency", latency, "--parent-pid", str(os.getpid())),
        *(("--log", str(log)) if log else ()),
        *options,
    ]
    with ended(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)) as process:
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        announced = json.loads(process.stdout.readline())
        yield Model(announced["url"], process.pid)


@contextlib.contextmanager
def workers(
    count: int,
    environment: Mapping[str, str],
    *arguments: str,
    app: str = "stepfleet.worker.app",
    python: Sequence[str] = (sys.executable,),
) -> Iterator[list[int]]:
    """Run `count` Celery workers; yield their process ids at once, ready or not."""
    with (
        tempfile.NamedTemporaryFile("w+", suffix=".log") as log,
        contextlib.ExitStack() as running,
    ):
        started = [
            running.enter_context(
                ended(
                    subprocess.Popen(
                        [*python, *worker_command(app, f"bench{number}", *arguments)[1:]],
                        env={**os.environ, **environment},
                        cwd=HERE,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        text=True,
                    )
                )
            )
            for number in range(count)
        ]
        try:
            yield [process.pid for process in started]
        except Exception:
            sys.stderr.write(
                f"The workers' log ends so:\n{Path(log.name).read_text()[-LOG_TAIL:]}\n"
            )
            raise


def worker_command(app: str, name: str, *arguments: str) -> list[str]:
    """Return the command line of a worker: as `stepfleet worker` starts it, or Celery does."""
    ours = app == "stepfleet.worker.app"
    module = ("stepfleet.worker",) if ours else ("celery", "-A", app, "worker")
    return [
        *(sys.executable, "-m", *module),
        *("--without-gossip", "--without-mingle", "-l", "warning"),
        *("-n", f"{name}@%h", *arguments),
    ]


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


def until(check: Callable[[], object], within: float = DEADLINE) -> float:
    """Wait until `check()` is true; return the monotonic time of that moment."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if check():
            return time.monotonic()
        time.sleep(LOOK_SECONDS)
    raise TimeoutError(f"not within {within} s")
