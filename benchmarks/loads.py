"""A whole fleet for a measurement, and its load; cost is counted as in `bench.py`."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

import redis
from agents import runner
from processes import HERE, LOG_TAIL, Model, model, redis_server, until, workers
from readings import SECTIONS, Cost, Reading

from stepfleet import Fleet

WARM_RUNS, WARM_STEPS = 20, 2
LONGEST = 1800.0
WARM_SECONDS = 120.0


@dataclass(frozen=True)
class Running:
    """A running fleet with its client."""

    url: str
    client: Fleet
    store: redis.Redis
    model: Model
    pids: tuple[int, ...]

    def reading(self) -> Reading:
        """Return what all parties have used so far."""
        return Reading.now([self.store.info(*SECTIONS)], self.pids, [self.model.pid])

    def cost(self, before: Reading, steps: int, end: float) -> Cost:
        """Return the cost of `steps` steps since `before`, the last one committed at `end`."""
        return Cost.between(before, replace(self.reading(), at=end), steps)

    def warm(self) -> None:
        """Have every worker connect, and do a few steps."""
        batch = self.client.submit_batch(
            lines(len(self.pids) * WARM_RUNS, WARM_STEPS), agent=runner
        )
        try:
            batch.wait(timeout=WARM_SECONDS)
        except TimeoutError:
            progress = batch.progress()
            raise RuntimeError(f"the workers do no steps; see their logs: {progress}") from None

    def batch(self, runs: int, steps: int) -> Cost:
        """Measure a batch, from the start of its submission to the end of its last run."""
        before = self.reading()
        batch = self.client.submit_batch(lines(runs, steps), agent=runner)
        end = until(lambda: batch.progress().done == runs, within=LONGEST)
        progress = batch.progress()
        if progress.completed != runs:
            raise RuntimeError(f"only {progress.completed} of {runs} runs completed: {progress}")
        return self.cost(before, progress.steps, end)


@dataclass(frozen=True)
class Setup:
    """A fleet to start. `slots` is per worker; `latency` as the model server's option has it.

    `service` are further options of the model server, `variables` of the workers' environment.
    """

    workers: int = 1
    slots: int = 1000
    latency: str = "0"
    log: Path | None = None
    stub: bool = False
    service: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def servers(setup: Setup) -> Iterator[tuple[str, Model]]:
    """Run Redis and the model server; yield Redis's URL, and the model."""
    with (
        redis_server() as (url, _),
        model(setup.latency, setup.log, stub=setup.stub, options=setup.service) as served,
    ):
        yield url, served


@contextlib.contextmanager
def fleet(setup: Setup, first: Callable[[Fleet], None] = lambda _: None) -> Iterator[Running]:
    """Run the fleet, its workers not yet warm; `first` is done before there is a worker."""
    with (
        servers(setup) as (url, served),
        Fleet(url, broker_url=setup.variables.get("STEPFLEET_BROKER_URL")) as client,
        redis.Redis.from_url(url) as store,
    ):
        first(client)
        variables = {**environment(url, served.url, setup.slots), **setup.variables}
        with workers(setup.workers, variables) as pids:
            yield Running(url, client, store, served, tuple(pids))


def environment(redis_url: str, model_url: str, slots: int) -> Mapping[str, str]:
    """Return the environment of a worker with the benchmark's agents."""
    return {
        "STEPFLEET_REDIS_URL": redis_url,
        "STEPFLEET_AGENTS": str(HERE / "agents.py"),
        "STEPFLEET_SLOTS": str(slots),
        "OPENAI_BASE_URL": model_url,
        "OPENAI_API_KEY": "none",
        "GEMINI_BASE_URL": model_url.removesuffix("/v1"),
        "GEMINI_API_KEY": "none",
    }


def lines(runs: int, steps: int) -> list[dict[str, str]]:
    """Return the lines of a batch; the time makes each measurement a batch of its own."""
    stamp = time.time_ns()
    return [{"id": f"{stamp}-{n}", "input": f"{steps} turns, run {stamp}-{n}"} for n in range(runs)]


@dataclass(frozen=True)
class Followed:
    """What `stepfleet run` took: wall and CPU seconds of the command, its own start among them."""

    wall: float
    cpu: float


def followed(
    runs: int,
    steps: int,
    variables: Mapping[str, str],
    folder: Path,
    python: Sequence[str] = (sys.executable,),
    within: float = LONGEST,
) -> Followed:
    """Play a batch by `stepfleet run`, which follows it and writes a file of results.

    `python` starts the interpreter, `within` is in seconds. Raises `RuntimeError` where a run does
    not complete.
    """
    file = folder / f"{time.monotonic_ns()}.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines(runs, steps)))
    options = ("--workers", "0", "--out", str(file.with_suffix(".results.jsonl")))
    before, began = getrusage(RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        [*python, "-m", "stepfleet.orchestrator.cli", "run", str(file), *options],
        env={**os.environ, "STEPFLEET_NO_CHECK": "1", **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=within,
        check=False,
    )
    wall, after = time.monotonic() - began, getrusage(RUSAGE_CHILDREN)
    if done.returncode:
        told = (done.stdout + done.stderr)[-LOG_TAIL:]
        raise RuntimeError(f"stepfleet run ended with {done.returncode}:\n{told}")
    return Followed(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
