"""A whole fleet for a measurement, and the load that it is given: wall, CPU, Redis, memory."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import redis
from agents import runner
from processes import HERE, Model, model, redis_server, until, usage, workers
from redis_use import Use, use

from stepfleet.orchestrator import Fleet

WARM_RUNS, WARM_STEPS = 20, 2
LONGEST = 1800.0
WARM_SECONDS = 120.0


@dataclass(frozen=True)
class Reading:
    """CPU seconds of each party, memory (bytes) of the workers, and Redis's counters, by now."""

    at: float
    worker_cpu: float
    redis_cpu: float
    model_cpu: float
    memory: int
    redis: Use


@dataclass(frozen=True)
class Cost:
    """What a load of `steps` steps took: seconds, CPU in ms per step, Redis's work per step.

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

    @property
    def rate(self) -> float:
        """Steps per second."""
        return self.steps / self.wall


@dataclass(frozen=True)
class Running:
    """A running fleet with its client."""

    url: str
    client: Fleet
    store: redis.Redis
    redis_pid: int
    model: Model
    pids: tuple[int, ...]

    def reading(self) -> Reading:
        """Return what everybody has used so far."""
        working = usage(list(self.pids))
        return Reading(
            time.monotonic(),
            working.cpu,
            usage([self.redis_pid]).cpu,
            usage([self.model.pid]).cpu,
            working.memory // max(1, len(self.pids)),
            use(self.store),
        )

    def cost(self, before: Reading, steps: int, end: float | None = None) -> Cost:
        """Return what `steps` steps took since `before`."""
        after = self.reading()
        told = after.redis.since(before.redis)

        def ms(one: float, other: float) -> float:
            return (one - other) * 1000 / steps

        return Cost(
            steps=steps,
            wall=(end or after.at) - before.at,
            worker_ms=ms(after.worker_cpu, before.worker_cpu),
            redis_ms=ms(after.redis_cpu, before.redis_cpu),
            model_ms=ms(after.model_cpu, before.model_cpu),
            round_trips=told.reads / steps,
            scripts=told.scripts / steps,
            commands=told.commands / steps,
            memory=after.memory,
            redis_memory=told.memory / steps,
        )

    def warm(self) -> None:
        """Have every worker connect, and do a few steps."""
        batch = self.client.submit_batch(
            lines(len(self.pids) * WARM_RUNS, WARM_STEPS), agent=runner
        )
        try:
            batch.wait(timeout=WARM_SECONDS)
        except TimeoutError:
            progress = batch.progress()
            raise RuntimeError(f"the workers do no steps; their logs say why: {progress}") from None

    def batch(self, runs: int, steps: int) -> Cost:
        """Measure a batch, from its submission's begin to its last run's end."""
        before = self.reading()
        batch = self.client.submit_batch(lines(runs, steps), agent=runner)
        end = until(lambda: batch.progress().done == runs, within=LONGEST)
        progress = batch.progress()
        if progress.completed != runs:
            raise RuntimeError(f"only {progress.completed} of {runs} runs completed: {progress}")
        return self.cost(before, progress.steps, end)


@dataclass(frozen=True)
class Setup:
    """A fleet to start. `slots` is per worker; `latency` as the model server's option has it."""

    workers: int = 1
    slots: int = 1000
    latency: str = "0"
    log: Path | None = None
    stub: bool = False


@contextlib.contextmanager
def servers(setup: Setup) -> Iterator[tuple[str, int, Model]]:
    """Run Redis and the model server; yield Redis's URL and process id, and the model."""
    with redis_server() as (url, pid), model(setup.latency, setup.log, stub=setup.stub) as served:
        yield url, pid, served


@contextlib.contextmanager
def fleet(setup: Setup, first: Callable[[Fleet], None] = lambda _: None) -> Iterator[Running]:
    """Run the fleet, its workers not yet warm; `first` is done before there is a worker."""
    with (
        servers(setup) as (url, redis_pid, served),
        Fleet(url) as client,
        redis.Redis.from_url(url) as store,
    ):
        first(client)
        with workers(setup.workers, environment(url, served.url, setup.slots)) as pids:
            yield Running(url, client, store, redis_pid, served, tuple(pids))


def environment(redis_url: str, model_url: str, slots: int) -> Mapping[str, str]:
    """Return what a worker of the benchmark's agent needs to know."""
    return {
        "STEPFLEET_REDIS_URL": redis_url,
        "STEPFLEET_AGENTS": str(HERE / "agents.py"),
        "STEPFLEET_SLOTS": str(slots),
        "OPENAI_BASE_URL": model_url,
        "OPENAI_API_KEY": "none",
    }


def lines(runs: int, steps: int) -> list[dict[str, str]]:
    """Return the lines of a batch; the time makes each measurement a batch of its own."""
    stamp = time.time_ns()
    return [{"id": f"{stamp}-{n}", "input": f"{steps} turns, run {stamp}-{n}"} for n in range(runs)]
