"""Steps per second, CPU per step, and wall time over the ideal, beside a bare chain and a floor.

python benchmarks/steps.py                      # latency 0 and 1 s, one and two workers
python benchmarks/steps.py --runs 3000 --latency 1 --workers 1
python benchmarks/steps.py --slots 100 500 1000 2000 3000 --latency 1 --workers 1 2

`--slots` sweeps how many runs are in flight: so many runs, and slots for all of them in every
worker. Rows: `stepfleet`; `stepfleet run`, with a plain tool on a thread, a conversation that grows
by a passage per step, and the command that follows the batch and writes its results; `floor`, the
chains of the first in one bare asyncio process (floor.py); `celery chain`, no-op tasks of a stock
worker, one sends the next. Then the latency that a step adds at low load, and what Redis does for a
step (added.py says how).

`--stub` takes stub.py instead of the model server that checks every request: where few cores are
shared, more of them are left for what is measured.

The ideal is latency times steps. CPU is in ms per step, for each party; the command (CLI) is
counted without its start. `trips` are Redis's reads from sockets per step, `scripts` its scripts
per step, `cmds` its commands, those in scripts among them.
"""

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import added
import bare
from loads import WARM_RUNS, WARM_STEPS, Setup, environment, fleet, followed
from plots import Line, Plot
from processes import HERE
from readings import Cost
from repeats import Spread, paired
from reports import Column, Report, begin, finish, grouped, parser, show, values

KEY = ("what", "workers", "in_flight", "latency", "steps_per_run")


def arguments() -> argparse.Namespace:
    """Return the parsed arguments."""
    made = parser(__doc__)
    add = made.add_argument
    add("--runs", type=int, default=1000)
    add("--steps", type=int, default=5)
    add("--latency", type=float, nargs="*", default=[0.0, 1.0], help="seconds of a model call")
    add("--workers", type=int, nargs="*", default=[1, 2])
    add("--slots", type=int, nargs="*", help="runs in flight, instead of --runs")
    add("--low-runs", type=int, default=10, help="runs at once for the added latency; 0: none")
    add("--low-steps", type=int, default=20)
    add("--stub", action="store_true", help="a model server that costs next to nothing")
    add("--no-chain", action="store_true")
    add("--no-floor", action="store_true")
    add("--no-run", action="store_true", help="without the row of `stepfleet run`")
    return made.parse_args()


def row(what: str, workers: int, in_flight: int, latency: float, cost: Cost) -> dict[str, Any]:
    """Return a measurement as a row. `over_ideal` is None without latency."""
    steps_per_run = cost.steps // in_flight
    ideal = latency * steps_per_run
    return {
        "what": what,
        "workers": workers,
        "in_flight": in_flight,
        "latency": latency,
        "steps_per_run": steps_per_run,
        "rate": cost.rate,
        "over_ideal": cost.wall / ideal if ideal else None,
        **asdict(cost),
        "megabytes": cost.memory / 1e6,
    }


def stepfleet(
    workers: int, in_flight: int, latency: float, args: argparse.Namespace
) -> dict[str, Any]:
    """Measure Stepfleet."""
    setup = Setup(workers, max(in_flight, 100), str(latency), stub=args.stub)
    with fleet(setup) as running:
        running.warm()
        cost = running.batch(in_flight, args.steps)
    return row("stepfleet", workers, in_flight, latency, cost)


def by_command(
    workers: int, in_flight: int, latency: float, args: argparse.Namespace
) -> dict[str, Any]:
    """Measure `stepfleet run` with its worker."""
    agents: Mapping[str, str] = {"STEPFLEET_AGENTS": str(HERE / "compare_agent.py")}
    setup = Setup(workers, max(in_flight, 100), str(latency), stub=args.stub, variables=agents)
    with fleet(setup) as running, tempfile.TemporaryDirectory(prefix="sf-bench-") as folder:
        variables = {**environment(running.url, running.model.url, setup.slots), **agents}
        play = partial(followed, variables=variables, folder=Path(folder))
        play(workers * WARM_RUNS, WARM_STEPS)
        start = play(1, 1)
        before = running.reading()
        used = play(in_flight, args.steps)
        wall = used.wall - start.wall + latency
        cost = replace(running.cost(before, in_flight * args.steps, 0.0), wall=wall)
    command_ms = (used.cpu - start.cpu) * 1000 / cost.steps
    return {**row("stepfleet run", workers, in_flight, latency, cost), "command_ms": command_ms}


def sweep(args: argparse.Namespace, report: Report) -> None:
    """Measure everything that is beside each other once."""
    for in_flight in args.slots or [args.runs]:
        if not args.no_chain:
            report.add(
                row(
                    *("celery chain", 1, in_flight, 0.0),
                    bare.chain(in_flight, args.steps, "-P", "solo"),
                )
            )
        for latency in args.latency:
            if not args.no_floor:
                cost = bare.floor(in_flight, args.steps, str(latency), stub=args.stub)
                report.add(row("floor", 1, in_flight, latency, cost))
            for workers in args.workers:
                report.add(stepfleet(workers, in_flight, latency, args))
                if not args.no_run:
                    report.add(by_command(workers, in_flight, latency, args))
    if args.low_runs:
        low = added.measure(args.low_runs, args.low_steps)
        report.add({"what": "added", **asdict(low)})


def ratios(report: Report) -> dict[str, Spread]:
    """Return our rates over the others', in pairs of the same repetition."""
    found = {}
    for key, group in grouped(_of(report, "stepfleet"), KEY).items():
        _, workers, in_flight, latency, _ = key
        label = f"{workers} worker(s), {in_flight} in flight, latency {latency:g} s"
        for other in ("floor", "celery chain"):
            beside = [
                one
                for one in _of(report, other)
                if (one["in_flight"], one["latency"]) == (in_flight, latency)
            ]
            if ratio := paired(values(group, "rate"), values(beside, "rate")):
                found[f"steps/s over the {other}'s ({label})"] = ratio
    return found


def print_tables(report: Report) -> None:
    """Print what was measured, in three tables of at most 100 columns."""
    rates = [one for one in report.rows if one["what"] != "added"]
    show(
        "One model call and one tool per step; the last step of a run has no tool",
        rates,
        KEY,
        [
            Column("what", "what"),
            Column("workers", "workers"),
            Column("runs", "in_flight"),
            Column("call s", "latency"),
            Column("steps/s", "rate", 0, spread=True),
            Column("wall/ideal", "over_ideal", 2, spread=True),
            Column("wall s", "wall", 2),
            Column("MB/worker", "megabytes", 0),
        ],
    )
    show(
        "Per step: CPU in ms, and what Redis is asked (the client's own polling is in it)",
        rates,
        KEY,
        [
            Column("what", "what"),
            Column("workers", "workers"),
            Column("runs", "in_flight"),
            Column("call s", "latency"),
            Column("worker", "worker_ms", 2, spread=True),
            Column("Redis", "redis_ms", 3),
            Column("CLI", "command_ms", 2),
            Column("model", "model_ms", 2),
            Column("trips", "round_trips", 2),
            Column("scripts", "scripts", 2),
            Column("cmds", "commands", 1),
        ],
    )
    show(
        "Low load: ms that a step adds (p50, p99), and commands that workers send per step",
        _of(report, "added"),
        ("runs", "steps"),
        [
            Column("turnaround", "turnaround_p50", 2, spread=True),
            Column("p99", "turnaround_p99", 2),
            Column("pickup", "pickup_p50", 2, spread=True),
            Column("p99", "pickup_p99", 2),
            Column("closing", "closing_p50", 2),
            Column("p99", "closing_p99", 2),
            Column("sent", "client_commands", 2),
            Column("in scripts", "inside", 1),
        ],
    )


def plots(report: Report) -> list[Plot]:
    """Return the sweep: wall over ideal, and CPU per step, against the runs in flight."""
    drawn = []
    for title, name in (("wall over ideal", "over_ideal"), ("CPU of workers", "worker_ms")):
        lines = []
        series = grouped(
            [one for one in report.rows if name in one], ("what", "workers", "latency")
        )
        for (what, workers, latency), rows in series.items():
            points = []
            for (in_flight,), group in sorted(grouped(rows, ("in_flight",)).items()):
                if known := values(group, name):
                    spread = Spread.of(known)
                    points.append((in_flight, spread.median, spread.low, spread.high))
            if points:
                lines.append(Line(f"{what}, {workers} worker(s), {latency:g} s", points))
        unit = "ms per step" if name == "worker_ms" else "ratio"
        drawn.append(Plot(title, "runs in flight", unit, lines))
    return drawn


def _of(report: Report, what: str) -> list[dict[str, Any]]:
    return [one for one in report.rows if one["what"] == what]


def main() -> None:
    """Measure, print, and write the files."""
    args = arguments()
    report = begin("steps", args)
    for _ in range(args.repeat):
        sweep(args, report)
    report.ratios.update(ratios(report))
    print_tables(report)
    finish(report, args, lambda: plots(report))


if __name__ == "__main__":
    main()
