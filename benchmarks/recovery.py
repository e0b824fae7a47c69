"""What the loss of workers costs: time until their runs work again, innocent runs given up.

python benchmarks/recovery.py                                # all scenarios, at their small sizes
python benchmarks/recovery.py --only two-kills --runs 1000 --latency 20 --lease 10
python benchmarks/recovery.py --only outside-kills --kills 15 --every 3

`rescue`: one of two workers is killed; the time until each of its runs calls the model again.
`two-kills`: all runs are in their model call, and twice the worker that has them is killed; the
time from the first kill to the last run's end, beside the bound: call + 2 leases + 20 s.
`outside-kills`: every few seconds the worker that has the most runs is killed, and replaced; how
many innocent runs are given up as poison, and how many model calls were made again.
`blocked-loop`: a tool holds up the event loop of one of two workers for longer than a lease; how
many model calls were made again.

Kills are SIGKILL. Times are in seconds. `lines` is what the workers logged.
"""

import argparse
import itertools
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import redis
from agents import blocker, runner
from crew import Crew, calls_of, crew, held, name_of, repeated
from loads import Setup, environment, lines, servers
from processes import until
from reports import Column, Report, begin, finish, parser, progress, show

from stepfleet import Batch, Fleet
from stepfleet.orchestrator.store.batches.batches import run_id_of

KEY = ("scenario", "runs", "latency", "lease")
START_SECONDS = 120.0
LONGEST = 7200.0
SLACK = 20.0
POISON = "ended its worker"


@dataclass(frozen=True)
class Sizes:
    """What a scenario plays with; `latency`, `lease` and `every` in seconds.

    `every` lies between kills, or is how long a loop is blocked.
    """

    runs: int
    latency: float
    steps: int
    lease: float
    workers: int
    kills: int
    every: float


SMALL = {
    "rescue": Sizes(200, 1.0, 30, 5.0, workers=2, kills=1, every=0.0),
    "two-kills": Sizes(200, 8.0, 1, 5.0, workers=1, kills=2, every=0.0),
    "outside-kills": Sizes(200, 3.0, 4, 2.0, workers=3, kills=15, every=3.0),
    "blocked-loop": Sizes(200, 2.0, 8, 2.0, workers=2, kills=0, every=7.0),
}


@dataclass(frozen=True)
class Scene:
    """A running fleet whose workers are at the scenario's mercy."""

    sizes: Sizes
    store: redis.Redis
    client: Fleet
    crew: Crew
    within: float
    calls: list[dict[str, Any]] = field(default_factory=list)
    """The model's calls, known when the scene is over."""

    def submit(self) -> tuple[Batch, dict[str, str]]:
        """Submit the runs; return the batch, and each run's input by its id."""
        given = lines(self.sizes.runs, self.sizes.steps)
        batch = self.client.submit_batch(given, agent=runner)
        inputs = {run_id_of(batch.id, row): line["input"] for row, line in enumerate(given)}
        return batch, inputs

    def ended(self, batch: Batch) -> float:
        """Wait until all runs have ended; return that moment, or the one when it was too long."""
        try:
            return until(lambda: batch.progress().done == self.sizes.runs, within=self.within)
        except TimeoutError:
            progress.print(f"not all have ended: {batch.progress()}")
            return time.monotonic()

    def holds(self, runs: Iterable[str], worker: str) -> list[str]:
        """Return the runs that a worker holds."""
        return held(self.store, runs).get(worker, [])


@contextmanager
def scene(sizes: Sizes, within: float) -> Iterator[Scene]:
    """Run servers and a client; no worker yet."""
    calls: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="sf-recovery-") as folder:
        log = Path(folder) / "calls.jsonl"
        setup = Setup(slots=max(100, sizes.runs), latency=str(sizes.latency), log=log, stub=True)
        with (
            servers(setup) as (url, served),
            Fleet(url) as client,
            redis.Redis.from_url(url) as store,
        ):
            variables = {
                **environment(url, served.url, setup.slots),
                "STEPFLEET_LEASE": str(sizes.lease),
                "STEPFLEET_GRACE": str(min(5.0, sizes.lease / 2)),
                "BLOCK_SECONDS": str(sizes.every),
                "BLOCK_ONCE": str(Path(folder) / "blocked"),
            }
            with crew(variables) as working:
                yield Scene(sizes, store, client, working, within, calls)
        calls += calls_of(log)


def rescue(sizes: Sizes, within: float) -> dict[str, Any]:
    """Kill one worker under load; measure when its runs call the model again."""
    with scene(sizes, within) as on:
        on.crew.start(sizes.workers)
        batch, runs = on.submit()
        victim = on.crew.workers[0]
        share = sizes.runs // (2 * sizes.workers)
        until(lambda: len(on.holds(runs, name_of(victim))) >= share, within=START_SECONDS)
        time.sleep(2 * sizes.latency)  # calls under way, answers and commits mixed
        on.crew.kill(victim)
        killed = time.monotonic()
        lost = set(on.holds(runs, name_of(victim)))
        on.crew.start()
        ended, done = on.ended(batch), batch.progress().done
        logged = len(on.crew.logged())
        failed = batch.progress().failed
    again = _first_after(on.calls, killed, {runs[run] for run in lost})
    return {
        "lost_runs": len(lost),
        "median": median(again),
        "p99": quantiles(again, n=100)[98] if len(again) > 1 else again[0],
        "worst": max(again),
        "ended": ended - killed,
        "done": done,
        "failed": failed,
        "repeated": repeated(on.calls),
        "lines": logged,
    }


def _first_after(calls: list[dict[str, Any]], moment: float, runs: set[str]) -> list[float]:
    first: dict[str, float] = {}
    for one in calls:
        run, at = one["run"], one["arrived"]
        if run in runs and at > moment:
            first[run] = min(first.get(run, at), at)
    return [at - moment for at in first.values()]


def two_kills(sizes: Sizes, within: float) -> dict[str, Any]:
    """Kill the worker that has all runs, several times; measure the time from the first kill."""
    with scene(sizes, within) as on:
        on.crew.start()
        batch, runs = on.submit()
        first = 0.0
        for number in range(sizes.kills):
            [victim] = on.crew.workers
            _all_in_flight(on, batch, runs, name_of(victim))
            on.crew.kill(victim)
            first = first or time.monotonic()
            progress.print(f"kill {number + 1} after {time.monotonic() - first:.1f} s")
            on.crew.start()
        ended, done = on.ended(batch), batch.progress().done
        logged, gave_up = len(on.crew.logged()), _given_up(batch)
        failed = batch.progress().failed
    bound = sizes.latency * sizes.steps + sizes.kills * sizes.lease + SLACK
    return {
        "ended": ended - first,
        "bound": bound,
        "poison": gave_up,
        "done": done,
        "failed": failed,
        "repeated": repeated(on.calls),
        "lines": logged,
    }


def _all_in_flight(on: Scene, batch: Batch, runs: Mapping[str, str], worker: str) -> None:
    """Wait until a worker holds every run that has not ended."""

    def everything() -> bool:
        return len(on.holds(runs, worker)) >= len(runs) - batch.progress().done

    until(everything, within=START_SECONDS)
    time.sleep(on.sizes.latency / 4)  # what is claimed last has sent its call by then


def outside_kills(sizes: Sizes, within: float) -> dict[str, Any]:
    """Kill the busiest worker at fixed intervals; count the outcomes of the runs."""
    with scene(sizes, within) as on:
        on.crew.start(sizes.workers)
        batch, runs = on.submit()
        until(lambda: len(held(on.store, runs)) >= sizes.workers, within=START_SECONDS)
        began = time.monotonic()
        for number in range(sizes.kills):
            _wait_till(began + number * sizes.every)
            on.crew.kill(_busiest(on, runs))
            on.crew.start()
        progress.print(f"the last kill: {batch.progress().done} of {sizes.runs} had ended")
        ended, done = on.ended(batch), batch.progress().done
        logged, gave_up = len(on.crew.logged()), _given_up(batch)
        failed = batch.progress().failed
    return {
        "ended": ended - began,
        "poison": gave_up,
        "done": done,
        "failed": failed,
        "repeated": repeated(on.calls),
        "lines": logged,
    }


def blocked_loop(sizes: Sizes, within: float) -> dict[str, Any]:
    """Block the loop of one worker that has its share of the runs; count repeated calls."""
    with scene(sizes, within) as on:
        on.crew.start(sizes.workers)
        batch, runs = on.submit()
        share = sizes.runs // (2 * sizes.workers)
        workers = [name_of(worker) for worker in on.crew.workers]
        until(lambda: all(len(on.holds(runs, one)) >= share for one in workers), START_SECONDS)
        began = time.monotonic()
        [line] = lines(sizes.runs + 1, 2)[-1:]
        on.client.runs.wait(on.client.submit(blocker, line["input"]), timeout=within)
        unblocked = time.monotonic() - began
        ended, done = on.ended(batch), batch.progress().done
        logged, failed = len(on.crew.logged()), batch.progress().failed
    return {
        "unblocked": unblocked,
        "ended": ended - began,
        "done": done,
        "failed": failed,
        "repeated": repeated(on.calls),
        "lines": logged,
    }


def _busiest(on: Scene, runs: Mapping[str, str]) -> "subprocess.Popen[str]":
    shares = held(on.store, runs)
    return max(on.crew.workers, key=lambda worker: len(shares.get(name_of(worker), [])))


def _wait_till(moment: float) -> None:
    while (left := moment - time.monotonic()) > 0:
        time.sleep(left)


def _given_up(batch: Batch) -> int:
    return sum(POISON in (one.error or "") for one in batch.results(follow=False))


SCENARIOS: dict[str, Callable[[Sizes, float], dict[str, Any]]] = {
    "rescue": rescue,
    "two-kills": two_kills,
    "outside-kills": outside_kills,
    "blocked-loop": blocked_loop,
}
COLUMNS = {
    "rescue": (
        "lost_runs",
        "median",
        "p99",
        "worst",
        "ended",
        "done",
        "failed",
        "repeated",
        "lines",
    ),
    "two-kills": ("ended", "bound", "poison", "done", "failed", "repeated", "lines"),
    "outside-kills": ("kills", "ended", "poison", "done", "failed", "repeated", "lines"),
    "blocked-loop": ("unblocked", "ended", "done", "failed", "repeated", "lines"),
}
SECONDS = {"median", "p99", "worst", "ended", "bound", "unblocked"}


def arguments() -> argparse.Namespace:
    """Return the parsed arguments."""
    made = parser(__doc__)
    add = made.add_argument
    add("--only", choices=SCENARIOS, nargs="*", default=list(SCENARIOS))
    add("--runs", type=int)
    add("--latency", type=float, help="seconds of a model call")
    add("--steps", type=int, help="model calls of a run")
    add("--lease", type=float, help="seconds")
    add("--workers", type=int, help="at once, where a scenario has several")
    add("--kills", type=int)
    add("--every", type=float, help="seconds between kills, or of a blocked loop")
    add("--within", type=float, default=LONGEST, help="seconds until what has not ended is left")
    return made.parse_args()


def sizes_of(scenario: str, args: argparse.Namespace) -> Sizes:
    """Return a scenario's sizes: its small ones, changed by the arguments."""
    names = Sizes.__dataclass_fields__
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    return replace(SMALL[scenario], **given)


def print_tables(report: Report) -> None:
    """Print a table per scenario."""
    for scenario, names in COLUMNS.items():
        rows = [one for one in report.rows if one["scenario"] == scenario]
        sizes = [Column("runs", "runs", 0), Column("call s", "latency", 1)]
        shown = [Column(name, name, 2 if name in SECONDS else 0) for name in names]
        lease = Column("lease s", "lease", 1)
        show(f"{scenario}: seconds, and counts", rows, KEY, [*sizes, lease, *shown])


def main() -> None:
    """Measure, print, and write the files."""
    args = arguments()
    report = begin("recovery", args)
    for _, scenario in itertools.product(range(args.repeat), args.only):
        sizes = sizes_of(scenario, args)
        given = {**vars_of(sizes), "scenario": scenario}
        report.add({**given, **SCENARIOS[scenario](sizes, args.within)})
    print_tables(report)
    finish(report, args, list)


def vars_of(sizes: Sizes) -> dict[str, Any]:
    """Return the sizes as columns."""
    return {name: getattr(sizes, name) for name in Sizes.__dataclass_fields__}


if __name__ == "__main__":
    main()
