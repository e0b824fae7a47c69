"""A service's rate limit under a whole fleet: the allowance used, and what the service refuses.

python benchmarks/limits.py                                  # all scenes, 3,000 requests a minute
python benchmarks/limits.py --only requests --workers 1 2 4 8 --runs 3000
python benchmarks/limits.py --only tenants --runs 2000

The service enforces token buckets (burst: two seconds) and answers 429 above. `requests` and
`tokens`: the fleet knows the limit. `unknown`: it learns it from 429s and headers. `tenants`: ten
runs of one tenant beside a flood of another, and alone. `cost`: the same runs without limits, and
under limits for which nobody waits.

`used` is what the service admitted over its allowance, from two seconds behind the first call to
the moment when nine tenths of the calls were admitted; `refused` is the share of calls answered
429; `overshoot` is the most that arrived in any 60 s (or in the whole time, where that is
shorter), over the allowance of that time and one burst, less 1.
"""

import argparse
import bisect
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agents import runner
from loads import Running, Setup, fleet, lines
from processes import until
from reports import Column, Report, begin, finish, parser, show

from stepfleet.orchestrator.store.keys import WORKERS

MODEL = "openai:benchmark"
SCENES = ("requests", "tokens", "unknown", "tenants", "cost")
STEPS = 5
BURST = 2.0
MINUTE = 60.0
WARM_UP = 2.0
MOST = 0.9
SMALL_RUNS = 10
LONGEST = 3600.0
AMPLE = 1e9
TOKENS_PER_CALL = 100.0


@dataclass(frozen=True)
class Call:
    """A model call as the service saw it: when (seconds), whether it was refused, its tokens."""

    at: float
    refused: bool
    tokens: int


def arguments() -> argparse.Namespace:
    """Return the parsed arguments."""
    made = parser(__doc__)
    made.add_argument("--only", nargs="*", choices=SCENES, default=list(SCENES))
    made.add_argument("--workers", nargs="*", type=int, default=[1, 2])
    made.add_argument("--runs", type=int, default=600, help=f"of {STEPS} calls each")
    made.add_argument("--rpm", type=float, default=3000.0, help="requests per minute")
    made.add_argument("--latency", default="1.0", help="seconds per call")
    made.add_argument("--slots", type=int, default=1000, help="per worker")
    return made.parse_args()


@contextmanager
def limited(
    args: argparse.Namespace,
    workers: int,
    served: dict[str, float],
    known: dict[str, Any],
    log: Path,
) -> Iterator[Running]:
    """Run a fleet that knows the limits `known`, before a service that enforces `served`."""
    options = tuple(f"--{name}={value:g}" for name, value in served.items())
    setup = Setup(
        workers,
        args.slots,
        args.latency,
        log,
        service=(*options, f"--burst={BURST:g}"),
        variables=configured(known),
    )
    with fleet(setup) as running:
        until(lambda: running.store.hlen(WORKERS) == workers)
        yield running


def configured(known: dict[str, Any]) -> dict[str, str]:
    """Return the environment of workers that know these limits."""
    return {"STEPFLEET_LIMITS": json.dumps(known)} if known else {}


def calls_of(log: Path) -> list[Call]:
    """Return the calls in the service's log, by time."""
    with log.open(encoding="utf-8") as file:
        entries = [json.loads(line) for line in file]
    calls = [
        Call(
            entry["received"],
            entry["limited"] is not None,
            (entry["prompt_tokens"] or 0) + (entry["completion_tokens"] or 0),
        )
        for entry in entries
    ]
    return sorted(calls, key=lambda call: call.at)


def figures(calls: Sequence[Call], per_minute: float, *, tokens: bool = False) -> dict[str, Any]:
    """Return use, refusals and overshoot of an allowance per minute."""
    admitted = [call for call in calls if not call.refused]
    weights = [call.tokens if tokens else 1 for call in admitted]
    begin_at = admitted[0].at + WARM_UP
    end_at = admitted[int(len(admitted) * MOST) - 1].at
    used = sum(
        weight
        for call, weight in zip(admitted, weights, strict=True)
        if begin_at < call.at <= end_at
    )
    typical = sum(weights) / len(weights)
    arrivals = [call.at for call in calls]
    window = min(MINUTE, arrivals[-1] - arrivals[0])
    most = max(
        bisect.bisect_right(arrivals, at + window) - number for number, at in enumerate(arrivals)
    )
    allowed = per_minute * (window + BURST) / MINUTE
    return {
        "used": used / (per_minute * (end_at - begin_at) / MINUTE),
        "refused": sum(call.refused for call in calls) / len(calls),
        "overshoot": most * typical / allowed - 1,
        "calls": len(calls),
    }


def work(on: Running, runs: int, tenant: str | None = None) -> float:
    """Submit runs and wait until all have completed; return the seconds."""
    started = time.monotonic()
    batch = on.client.submit_batch(lines(runs, STEPS), agent=runner, tenant=tenant)
    end = until(lambda: batch.progress().done == runs, within=LONGEST)
    if (progress := batch.progress()).completed != runs:
        raise RuntimeError(f"only {progress.completed} of {runs} runs completed: {progress}")
    return end - started


def measure_limit(args: argparse.Namespace, scene: str, workers: int) -> dict[str, Any]:
    """Measure the use of one limit by one batch."""
    tokens = scene == "tokens"
    per_minute = args.rpm * TOKENS_PER_CALL if tokens else args.rpm
    field = "tokens_per_minute" if tokens else "requests_per_minute"
    known = {} if scene == "unknown" else {MODEL: {field: per_minute}}
    with tempfile.TemporaryDirectory(prefix="sf-limits-") as folder:
        log = Path(folder) / "calls.jsonl"
        with limited(args, workers, {"tpm" if tokens else "rpm": per_minute}, known, log) as on:
            seconds = work(on, args.runs)
        found = figures(calls_of(log), per_minute, tokens=tokens)
    return {"scene": scene, "workers": workers, "runs": args.runs, "seconds": seconds, **found}


def measure_tenants(args: argparse.Namespace, workers: int) -> dict[str, Any]:
    """Measure ten runs of a tenant alone, and beside a flood."""
    known = {MODEL: {"requests_per_minute": args.rpm}}
    with tempfile.TemporaryDirectory(prefix="sf-limits-") as folder:
        log = Path(folder) / "calls.jsonl"
        with limited(args, workers, {"rpm": args.rpm}, known, log) as on:
            alone = work(on, SMALL_RUNS, "small")
            flood = on.client.submit_batch(lines(args.runs, STEPS), agent=runner, tenant="flood")
            until(lambda: flood.progress().steps >= 2 * args.rpm / MINUTE, within=LONGEST)
            beside = work(on, SMALL_RUNS, "small")
            left = args.runs - flood.progress().done
            flood.cancel()
    return {
        "scene": "tenants",
        "workers": workers,
        "runs": args.runs,
        "alone": alone,
        "beside": beside,
        "ratio": beside / alone,
        "flood_left": left,
    }


def measure_cost(args: argparse.Namespace, known: dict[str, Any], name: str) -> dict[str, Any]:
    """Measure what a step costs under limits for which nobody waits, or without any."""
    setup = Setup(1, args.slots, "0", stub=True, variables=configured(known))
    with fleet(setup) as on:
        on.warm()
        cost = on.batch(args.runs, STEPS)
    return {"scene": "cost", "limits": name, "runs": args.runs, **asdict(cost)}


def main() -> None:
    """Measure and print."""
    args = arguments()
    report = begin("limits", args)
    for _ in range(args.repeat):
        for scene in (one for one in args.only if one in ("requests", "tokens", "unknown")):
            for workers in args.workers:
                report.add(measure_limit(args, scene, workers))
        if "tenants" in args.only:
            report.add(measure_tenants(args, args.workers[0]))
        if "cost" in args.only:
            ample = {MODEL: {"requests_per_minute": AMPLE, "tokens_per_minute": AMPLE}}
            for known, name in (({}, "none"), (ample, "ample")):
                report.add(measure_cost(args, known, name))
    print_tables(report)
    finish(report, args, list)


def print_tables(report: Report) -> None:
    """Print a table for each kind of scene."""
    of = {scene: [row for row in report.rows if row["scene"] == scene] for scene in SCENES}
    show(
        "One limit",
        of["requests"] + of["tokens"] + of["unknown"],
        ("scene", "workers"),
        [
            Column("scene", "scene"),
            Column("workers", "workers"),
            Column("used", "used", 3, spread=True),
            Column("refused", "refused", 4, spread=True),
            Column("overshoot", "overshoot", 3, spread=True),
            Column("calls", "calls", 0),
            Column("seconds", "seconds", 1),
        ],
    )
    show(
        "Ten runs of a small tenant",
        of["tenants"],
        ("scene", "workers"),
        [
            Column("flood", "runs"),
            Column("alone s", "alone", 1, spread=True),
            Column("beside s", "beside", 1, spread=True),
            Column("ratio", "ratio", 2, spread=True),
            Column("flood left", "flood_left", 0),
        ],
    )
    show(
        "Cost of a step",
        of["cost"],
        ("scene", "limits"),
        [
            Column("limits", "limits"),
            Column("worker CPU ms", "worker_ms", 3, spread=True),
            Column("Redis CPU ms", "redis_ms", 3, spread=True),
            Column("commands", "commands", 2, spread=True),
        ],
    )


if __name__ == "__main__":
    main()
