"""Map-reduce: wall time over the ideal, and CPU per step, beside a plain batch of as many runs.

python benchmarks/graphs.py                            # 10,000 runs, pages of 100, two workers
python benchmarks/graphs.py --runs 500 --page 20 --workers 1

`map-reduce` is a batch whose results are taken in pages until one run is left; `plain` is one batch
of as many runs. The ideal is the latency of a model call for each round of slots of each level, as
the levels follow each other. `gap` is the longest time between the last end of a level and the
first call of the next one, in seconds.
"""

import argparse
import math
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from agents import runner
from loads import LONGEST, Running, Setup, fleet, lines
from readings import Cost
from reports import Column, begin, finish, parser, show

from stepfleet import Batch

KEY = ("what", "runs", "page", "workers", "latency")
TEXT = "1 turns: {count} results, {outputs}"


def arguments() -> argparse.Namespace:
    """Return the parsed arguments."""
    made = parser(__doc__)
    add = made.add_argument
    add("--runs", type=int, default=10_000)
    add("--page", type=int, default=100)
    add("--workers", type=int, default=2)
    add("--slots", type=int, default=1000)
    add("--latency", type=float, default=1.0, help="seconds of a model call")
    return made.parse_args()


def levels(runs: int, page: int) -> list[int]:
    """Return the number of runs of each level."""
    found = [runs]
    while found[-1] > 1:
        found.append(-(-found[-1] // page))
    return found


def ideal(counts: list[int], args: argparse.Namespace) -> float:
    """Return the seconds that model calls take where nothing else does."""
    slots = args.workers * args.slots
    return float(args.latency * sum(math.ceil(one / slots) for one in counts))


def map_reduce(running: Running, args: argparse.Namespace) -> tuple[Cost, float]:
    """Measure from the start of the submission to the end of the last run."""
    before = running.reading()
    first = running.client.submit_batch(lines(args.runs, 1), agent=runner)
    last = first.then(runner, TEXT, page=args.page, until_one=True)
    progress = last.wait(LONGEST)
    if not progress.ok:
        raise RuntimeError(f"the last run did not complete: {progress}")
    cost = running.cost(before, sum(levels(args.runs, args.page)), running.reading().at)
    return cost, gap(running, last)


def gap(running: Running, last: Batch) -> float:
    """Return the longest time in which no level was at work."""
    batches = [last]
    while follows := batches[-1].progress().follows:
        batches.append(running.client.batches.get(follows))
    spans = []
    for batch in reversed(batches):
        results = [one for one in batch.results(follow=False) if one.end_time and one.steps]
        begins = [one.steps[0].started_at.timestamp() for one in results]
        spans.append(
            (min(begins), max(one.end_time.timestamp() for one in results if one.end_time))
        )
    return max((later[0] - earlier[1] for earlier, later in pairwise(spans)), default=0.0)


def row(what: str, cost: Cost, best: float, args: argparse.Namespace) -> dict[str, Any]:
    """Return a measurement as a row."""
    given = {name: getattr(args, name) for name in ("runs", "page", "workers", "latency")}
    over = cost.wall / best if best else None
    return {"what": what, **given, "ideal": best, "over_ideal": over, **asdict(cost)}


def main() -> None:
    """Measure, print, and write the files."""
    args = arguments()
    report = begin("graphs", args)
    counts = levels(args.runs, args.page)
    for _ in range(args.repeat):
        with fleet(Setup(args.workers, args.slots, str(args.latency))) as running:
            running.warm()
            plain = running.batch(sum(counts), 1)
            report.add(row("plain", plain, ideal([sum(counts)], args), args))
            cost, longest = map_reduce(running, args)
            report.add({**row("map-reduce", cost, ideal(counts, args), args), "gap": longest})
    columns = [
        Column("what", "what"),
        Column("runs", "steps"),
        Column("wall s", "wall", 2, spread=True),
        Column("wall/ideal", "over_ideal", 2, spread=True),
        Column("gap s", "gap", 2, spread=True),
        Column("worker ms", "worker_ms", 2, spread=True),
        Column("Redis ms", "redis_ms", 3),
        Column("scripts", "scripts", 2),
    ]
    show("Per step: CPU in ms, and Redis's scripts", report.rows, KEY, columns)
    finish(report, args, list)


if __name__ == "__main__":
    main()
