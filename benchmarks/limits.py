"""A service's rate limit under a whole fleet: the allowance used, calls refused, the cost.

python benchmarks/limits.py                                  # all scenes, 3,000 requests a minute
python benchmarks/limits.py --only requests tokens --workers 1 2 4 8 --runs 3000
python benchmarks/limits.py --only tenants --flood 10000
python benchmarks/limits.py --only waiting --waiting 50 50000 --wipe
python benchmarks/limits.py --only peers --runs 600

The service enforces token buckets (burst: two seconds) and answers 429 above. Each scene runs
alone; about so much time (on a busy machine with two cores):

`requests`, `tokens`  the fleet knows the limit; 65 s for each number of workers with 600 runs
`unknown`, `blind`    it learns the limit from 429s and headers, or from 429s alone; as long, and
                      fair with 1,200 runs
`changed`, `changed_blind`   the same, with a limit that the service halves after 30 s and doubles
                      60 s later: the seconds after which 95% of the new allowance are used over
                      10 s, with less than 5% refused; four minutes
`tenants`             ten runs of one tenant alone, while a flood of another comes in, and
                      once it is in line; a minute and a half
`cost`                the same runs without limits, and under limits for which nobody waits; 30 s
`waiting`             the cost of a step while 50, and while 50,000 wait for its limit; 30 s, and
                      five minutes with 50,000; three more with `--wipe`, which loses the line
`budget`              a tenant's budget of `--usd` over `--budget-workers`, one of which is killed:
                      what is spent, beside the ledger and the service's log; two minutes
`peers`               the service of `requests` before Inspect's adaptive connections and LiteLLM's
                      router, each in one process; one to three minutes each (`--peer-seconds`),
                      and a minute to make their environments (uv and the package index)

`used` is what the service admitted over its allowance, from two seconds behind the first call to
the moment when nine tenths of the calls were admitted; `refused` is the share of calls answered
429; `in all` is what is used until the last call, so that a slow end counts; `overshoot` is the
most that arrived in any 60 s (or in the whole time, where that is shorter), over the allowance of
that time and one burst, less 1.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agents import runner, silent
from limit_scenes import budget, changed, peers, waiting
from limit_scenes.service_log import BURST, MINUTE, calls_of, figures
from limit_scenes.tables import CHANGED, LIMITED, TABLES
from limit_scenes.waiting import MODEL
from loads import Running, Setup, fleet, lines
from processes import until
from reports import Report, begin, finish, parser, show

from stepfleet import Agent
from stepfleet.orchestrator.store.keys import WORKERS

SCENES = (*LIMITED, *CHANGED, "tenants", "cost", "waiting", "budget", "peers")
STEPS = 5
SMALL_RUNS = 10
LONGEST = 3600.0
AMPLE = 1e9
TOKENS_PER_CALL = 100.0


def arguments() -> argparse.Namespace:
    """Return the parsed arguments."""
    made = parser(__doc__)
    made.add_argument("--only", nargs="*", choices=SCENES, default=list(SCENES))
    made.add_argument("--workers", nargs="*", type=int, default=[1, 2])
    made.add_argument("--runs", type=int, default=600, help=f"of {STEPS} calls each")
    made.add_argument("--rpm", type=float, default=3000.0, help="requests per minute")
    made.add_argument("--latency", default="1.0", help="seconds per call")
    made.add_argument("--slots", type=int, default=1000, help="per worker")
    made.add_argument("--flood", type=int, default=10_000, help="runs of the other tenant")
    made.add_argument("--waiting", nargs="*", type=int, default=[50, 50_000], help="steps in line")
    made.add_argument("--measured", type=int, default=2000, help="steps measured, for `waiting`")
    made.add_argument("--wipe", action="store_true", help="lose the line after `waiting`")
    made.add_argument("--usd", type=float, default=5.0, help="the budget, for `budget`")
    made.add_argument("--budget-workers", type=int, default=8, help="workers, for `budget`")
    made.add_argument("--peers", nargs="*", choices=list(peers.PEERS), default=list(peers.PEERS))
    made.add_argument("--peer-seconds", type=float, default=300.0, help="most for each peer")
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


def agent_of(scene: str) -> Agent:
    """Return the scene's agent: its service states limits in headers, or does not."""
    return silent if "blind" in scene else runner


def work(on: Running, runs: int, tenant: str | None = None, agent: Agent = runner) -> float:
    """Submit runs and wait until all have completed; return the seconds."""
    started = time.monotonic()
    batch = on.client.submit_batch(lines(runs, STEPS), agent=agent, tenant=tenant)
    end = until(lambda: batch.progress().done == runs, within=LONGEST)
    if (progress := batch.progress()).completed != runs:
        raise RuntimeError(f"only {progress.completed} of {runs} runs completed: {progress}")
    return end - started


def measure_limit(args: argparse.Namespace, scene: str, workers: int) -> dict[str, Any]:
    """Measure the use of one limit by one batch."""
    tokens = scene == "tokens"
    per_minute = args.rpm * TOKENS_PER_CALL if tokens else args.rpm
    field = "tokens_per_minute" if tokens else "requests_per_minute"
    known = {MODEL: {field: per_minute}} if scene in {"requests", "tokens"} else {}
    with tempfile.TemporaryDirectory(prefix="sf-limits-") as folder:
        log = Path(folder) / "calls.jsonl"
        with limited(args, workers, {"tpm" if tokens else "rpm": per_minute}, known, log) as on:
            seconds = work(on, args.runs, agent=agent_of(scene))
        found = figures(calls_of(log), per_minute, tokens=tokens)
    return {"scene": scene, "workers": workers, "runs": args.runs, "seconds": seconds, **found}


def measure_change(args: argparse.Namespace, scene: str, workers: int) -> dict[str, Any]:
    """Measure how the fleet follows a limit that is halved, then doubled."""
    with tempfile.TemporaryDirectory(prefix="sf-limits-") as folder:
        log = Path(folder) / "calls.jsonl"
        with limited(args, workers, {"rpm": args.rpm}, {}, log) as on:
            found = changed.measure(on, agent_of(scene), args.rpm, log)
    return {"scene": scene, "workers": workers, **found}


def measure_tenants(args: argparse.Namespace, workers: int) -> dict[str, Any]:
    """Measure ten runs of a tenant alone, and beside a flood."""
    known = {MODEL: {"requests_per_minute": args.rpm}}
    with tempfile.TemporaryDirectory(prefix="sf-limits-") as folder:
        log = Path(folder) / "calls.jsonl"
        with limited(args, workers, {"rpm": args.rpm}, known, log) as on:
            alone = work(on, SMALL_RUNS, "small")
            flood = on.client.submit_batch(lines(args.flood, STEPS), agent=runner, tenant="flood")
            until(lambda: flood.progress().steps >= 2 * args.rpm / MINUTE, within=LONGEST)
            coming = work(on, SMALL_RUNS, "small")
            goal = 0.9 * (args.flood - flood.progress().done)
            until(lambda: waiting.in_line(on.store) >= goal, within=LONGEST)
            beside = work(on, SMALL_RUNS, "small")
            left = args.flood - flood.progress().done
            flood.cancel()
    return {
        "scene": "tenants",
        "workers": workers,
        "runs": args.flood,
        "alone": alone,
        "coming": coming,
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


def measure_peers(args: argparse.Namespace, report: Report) -> None:
    """Measure ourselves, then each peer."""
    report.add(
        measure_limit(args, "requests", 1) | {"scene": "peers", "what": "stepfleet", "ended": "yes"}
    )
    for name in args.peers:
        job = (args.runs, STEPS, args.rpm, args.latency, args.peer_seconds)
        report.add(peers.measure(name, *job))


def main() -> None:
    """Measure and print."""
    args = arguments()
    report = begin("limits", args)
    for _ in range(args.repeat):
        for scene in (one for one in args.only if one in LIMITED + CHANGED):
            measure = measure_limit if scene in LIMITED else measure_change
            for workers in args.workers:
                report.add(measure(args, scene, workers))
        if "tenants" in args.only:
            report.add(measure_tenants(args, args.workers[0]))
        if "cost" in args.only:
            ample = {MODEL: {"requests_per_minute": AMPLE, "tokens_per_minute": AMPLE}}
            for known, name in (({}, "none"), (ample, "ample")):
                report.add(measure_cost(args, known, name))
        for size in args.waiting if "waiting" in args.only else ():
            report.add(waiting.measure(size, args.measured, wipe=args.wipe))
        if "budget" in args.only:
            with tempfile.TemporaryDirectory(prefix="sf-limits-") as folder:
                job = (args.budget_workers, args.usd, args.latency, Path(folder))
                report.add(budget.measure(*job))
        if "peers" in args.only:
            measure_peers(args, report)
    print_tables(report)
    finish(report, args, list)


def print_tables(report: Report) -> None:
    """Print a table for each kind of scene."""
    for one in TABLES:
        rows = [row for scene in one.scenes for row in report.rows if row["scene"] == scene]
        show(one.title, rows, one.by, one.columns)


if __name__ == "__main__":
    main()
