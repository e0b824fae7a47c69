"""Cost of a step against the run's history, against the runs that wait, against the workers.

python benchmarks/scale.py                          # all three
python benchmarks/scale.py --only history --history 1 10 50 100 200 500 --total 2000
python benchmarks/scale.py --only waiting --waiting 0 1000 10000 100000
python benchmarks/scale.py --only workers --workers 1 2 4 --runs 1000 --latency 0

`history`: runs of so many steps each, `--total` steps in all or more, always as many at once, so
that a step has on average half of its run behind it; beside the floor, whose conversations grow
alike (the floor of a long history is the JSON that has to be sent to the model). `waiting`: so
many runs lie queued behind the ones that are worked on, until the last step measured.
`workers`: the same load for more processes, all on this machine.
"""

import argparse
from dataclasses import asdict
from typing import Any

import bare
from agents import runner
from loads import LONGEST, WARM_SECONDS, Running, Setup, fleet, lines
from plots import Line, Plot
from processes import until
from readings import Cost
from repeats import Spread, paired
from reports import Column, Report, begin, finish, grouped, parser, progress, show, values

from stepfleet import Batch, Fleet

PARTS = ("history", "waiting", "workers")
KEY = ("part", "what", "size")
FEW_SLOTS = 50


def arguments() -> argparse.Namespace:
    """Return the parsed arguments."""
    made = parser(__doc__)
    add = made.add_argument
    add("--only", choices=PARTS, nargs="*", default=PARTS)
    add("--history", type=int, nargs="*", default=[1, 10, 50, 100, 200, 500])
    add("--total", type=int, default=2000, help="least steps in all for each length of history")
    add("--in-flight", type=int, default=20, help="runs at once, for every length of history")
    add("--waiting", type=int, nargs="*", default=[0, 1000, 10_000, 100_000])
    add("--workers", type=int, nargs="*", default=[1, 2, 4])
    add("--runs", type=int, default=500, help="runs measured, for `waiting` and `workers`")
    add("--steps", type=int, default=5)
    add("--latency", type=float, default=0.0, help="seconds of a model call, for `workers`")
    add("--stub", action="store_true", help="a model server that costs next to nothing")
    add("--no-floor", action="store_true")
    return made.parse_args()


def row(part: str, what: str, size: int, cost: Cost) -> dict[str, Any]:
    """Return a measurement as a row; `size` is steps per run, runs waiting, or workers."""
    return {
        "part": part,
        "what": what,
        "size": size,
        "rate": cost.rate,
        **asdict(cost),
        "megabytes": cost.memory / 1e6,
    }


def history(args: argparse.Namespace, report: Report) -> None:
    """Measure runs of growing length."""
    for steps in args.history:
        runs = max(args.in_flight, args.total // steps)
        if not args.no_floor:
            report.add(
                row(
                    "history",
                    "floor",
                    steps,
                    bare.floor(runs, steps, "0", stub=args.stub, at_once=args.in_flight),
                )
            )
        with fleet(Setup(slots=args.in_flight, stub=args.stub)) as running:
            running.warm()
            report.add(row("history", "stepfleet", steps, running.batch(runs, steps)))


def waiting(args: argparse.Namespace, report: Report) -> None:
    """Measure the same work with more and more runs behind it."""
    for size in args.waiting:
        given = lines(FEW_SLOTS + args.runs + size, args.steps)
        submitted: list[Batch] = []

        def submit(
            client: Fleet, given: list[dict[str, str]] = given, into: list[Batch] = submitted
        ) -> None:
            progress.print(f"submitting {len(given)} runs")
            into.append(client.submit_batch(given, agent=runner))

        with fleet(Setup(slots=FEW_SLOTS, stub=args.stub), submit) as running:
            cost = _ahead_of(running, submitted[0], args.runs)
            report.add(row("waiting", "stepfleet", size, cost))


def _ahead_of(running: Running, batch: Batch, runs: int) -> Cost:
    """Measure the batch's first runs, behind those that warm the worker; the others wait."""
    until(lambda: batch.progress().done >= FEW_SLOTS, within=WARM_SECONDS)
    before, reached = running.reading(), batch.progress()
    goal = reached.done + runs
    end = until(lambda: batch.progress().done >= min(goal, reached.total), within=LONGEST)
    return running.cost(before, batch.progress().steps - reached.steps, end)


def workers(args: argparse.Namespace, report: Report) -> None:
    """Measure the same load with more worker processes."""
    for count in args.workers:
        setup = Setup(count, max(100, args.runs), str(args.latency), stub=args.stub)
        with fleet(setup) as running:
            running.warm()
            report.add(row("workers", "stepfleet", count, running.batch(args.runs, args.steps)))


def print_tables(report: Report) -> None:
    """Print a table per part."""
    for part, heading in zip(PARTS, ("steps/run", "waiting", "workers"), strict=True):
        rows = [one for one in report.rows if one["part"] == part]
        show(
            f"{part}: CPU in ms per step, Redis's work per step",
            rows,
            KEY,
            [
                Column("what", "what"),
                Column(heading, "size"),
                Column("steps/s", "rate", 0, spread=True),
                Column("worker", "worker_ms", 2, spread=True),
                Column("Redis", "redis_ms", 3),
                Column("model", "model_ms", 2),
                Column("trips", "round_trips", 2),
                Column("commands", "commands", 1),
                Column("MB/worker", "megabytes", 0),
            ],
        )


def ratios(report: Report) -> dict[str, Spread]:
    """Return each size's worker CPU over that of the part's smallest size, in pairs."""
    found = {}
    groups = grouped(report.rows, KEY)
    for (part, what, size), rows in groups.items():
        least = min(key[2] for key in groups if key[:2] == (part, what))
        first = groups[part, what, least]
        if ratio := paired(values(rows, "worker_ms"), values(first, "worker_ms")):
            found[f"worker CPU per step, {what}, {part} {size} over {least}"] = ratio
    return found


def plots(report: Report) -> list[Plot]:
    """Return a plot per part: CPU per step against the size."""
    drawn = []
    for part in PARTS:
        ours = [one for one in report.rows if one["part"] == part]
        lines_of = []
        for (what,), rows in grouped(ours, ("what",)).items():
            points = []
            for (size,), group in sorted(grouped(rows, ("size",)).items()):
                spread = Spread.of(values(group, "worker_ms"))
                points.append((size, spread.median, spread.low, spread.high))
            lines_of.append(Line(what, points))
        if lines_of:
            drawn.append(Plot(part, part, "CPU ms per step", lines_of, part == "waiting"))
    return drawn


def main() -> None:
    """Measure, print, and write the files."""
    args = arguments()
    report = begin("scale", args)
    measures = {"history": history, "waiting": waiting, "workers": workers}
    for _ in range(args.repeat):
        for part in args.only:
            measures[part](args, report)
    report.ratios.update(ratios(report))
    print_tables(report)
    finish(report, args, lambda: plots(report))


if __name__ == "__main__":
    main()
