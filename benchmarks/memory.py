"""Memory in Redis that an ended run takes, by kind of key, and the time that reading it takes.

python benchmarks/memory.py                            # runs of 5 and of 20 steps, whole fleet
python benchmarks/memory.py --steps 5 --runs 1000 --agent reader

A real worker does the runs; then each run's keys are measured by MEMORY USAGE (every element, not
a sample), and `used_memory` before and after is compared, which has what the keys share as well:
indexes, the batch, what the allocator rounds up. `runner` calls a tool that returns a number,
`reader` one that returns 8 kB of text. `read` is the CPU of a client per whole reading (trace and
outcomes, `fleet.runs.show`), `told` that of all its events.
"""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import redis
from agents import reader, runner
from loads import LONGEST, Setup, fleet, lines
from processes import until
from reports import Column, Report, begin, finish, parser, show

from stepfleet import Batch, Fleet

AGENTS = {"runner": runner, "reader": reader}
KEY = ("agent", "steps")
PARTS = ("header", "log", "outcomes", "events", "journal", "lost")
SETTLE_SECONDS = 0.5
READINGS = 100


def arguments() -> argparse.Namespace:
    """Return the parsed arguments."""
    made = parser(__doc__)
    add = made.add_argument
    add("--steps", type=int, nargs="*", default=[5, 20], help="steps of each run")
    add("--runs", type=int, default=200, help="runs of each length")
    add("--agent", choices=list(AGENTS), nargs="*", default=list(AGENTS))
    add("--stub", action="store_true", help="a model server that costs next to nothing")
    return made.parse_args()


def measure(agent: str, steps: int, args: argparse.Namespace) -> dict[str, Any]:
    """Do the runs; return what one of them takes."""
    with fleet(Setup(slots=args.runs, stub=args.stub)) as running:
        running.warm()
        time.sleep(SETTLE_SECONDS)
        before = running.reading()
        batch = running.client.submit_batch(lines(args.runs, steps), agent=AGENTS[agent])
        end = until(lambda: batch.progress().done == args.runs, within=LONGEST)
        progress = batch.progress()
        if progress.completed != args.runs:
            raise RuntimeError(f"only {progress.completed} of {args.runs} runs completed")
        cost = running.cost(before, progress.steps, end)
        run_ids = [result.run_id for result in batch.results()]
        return {
            "agent": agent,
            "steps": steps,
            "runs": args.runs,
            "used": cost.redis_memory * steps,
            "worker_ms": cost.worker_ms,
            "redis_ms": cost.redis_ms,
            **stored(running.store, run_ids),
            **readings(running.client, batch, run_ids),
        }


def stored(store: redis.Redis, run_ids: list[str]) -> dict[str, float]:
    """Return the bytes per run of each kind of key, and of all of them."""
    ours, found = set(run_ids), Counter[str]()
    for key in store.scan_iter("sf:*:run:*", count=1000):
        _, _, _, run_id, *part = key.decode().split(":")
        if run_id in ours:
            taken = store.memory_usage(key, samples=0)
            found[part[0] if part else "header"] += int(taken or 0)
    kinds = {kind: found[kind] / len(run_ids) for kind in PARTS}
    return {**kinds, "bytes": sum(found.values()) / len(run_ids)}


def readings(client: Fleet, batch: Batch, run_ids: list[str]) -> dict[str, float]:
    """Return the client's CPU per reading, in ms."""
    sample = run_ids[:READINGS]
    return {
        "read_ms": _cpu(client.runs.show, sample),
        "told_ms": _cpu(lambda run_id: list(client.runs.events(run_id)), sample),
        "results_ms": _cpu(lambda _: list(batch.results()), ["all"] * 3) / len(run_ids),
    }


def _cpu(read: Callable[[str], Any], run_ids: list[str]) -> float:
    taken = []
    for run_id in run_ids:
        began = time.process_time()
        read(run_id)
        taken.append((time.process_time() - began) * 1000)
    return statistics.median(taken)


def print_tables(report: Report) -> None:
    """Print what a run takes, and what reading it does."""
    for row in report.rows:
        for kind in (*PARTS, "bytes", "used"):
            row[f"{kind}_kb"] = row[kind] / 1000
    sizes = ("bytes", "used", *PARTS[:4])
    show(
        "kB in Redis per ended run (MEMORY USAGE of its keys; `used`: difference of used_memory)",
        report.rows,
        KEY,
        [
            Column("agent", "agent"),
            Column("steps", "steps"),
            *(Column("keys" if size == "bytes" else size, f"{size}_kb", 1) for size in sizes),
        ],
    )
    show(
        "CPU in ms: of a step, of Redis per step; of a client per reading of a run",
        report.rows,
        KEY,
        [
            Column("agent", "agent"),
            Column("steps", "steps"),
            Column("worker", "worker_ms", 2, spread=True),
            Column("Redis", "redis_ms", 3, spread=True),
            Column("read", "read_ms", 2, spread=True),
            Column("told", "told_ms", 2, spread=True),
            Column("result", "results_ms", 2, spread=True),
        ],
    )


def main() -> None:
    """Measure, print, and write the files."""
    args = arguments()
    report = begin("memory", args)
    for _ in range(args.repeat):
        for agent in args.agent:
            for steps in args.steps:
                report.add(measure(agent, steps, args))
    print_tables(report)
    finish(report, args, list)


if __name__ == "__main__":
    main()
