"""A whole fleet for a measurement, and its load; cost is counted as in `bench.py`."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import redis
from agents import runner
from processes import HERE, Model, model, redis_server, until, workers
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
        Fleet(url) as client,
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
