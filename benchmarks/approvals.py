"""Calls that wait for people: what they cost while they wait, and how fast one command decides all.

python benchmarks/approvals.py                         # 5,000 runs, one worker, 30 s of waiting
python benchmarks/approvals.py --runs 200 --seconds 5

`idle` is the fleet with nothing to do, `waiting` the same fleet while each run waits for an
approval. `decide` is `stepfleet decide --approve --tool look --yes` as a process, `done` the time
from its start to the end of the last run. The calls that were made are counted: none before the
decision, and none twice.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from agents import asker
from loads import LONGEST, Running, Setup, fleet, lines
from processes import until
from reports import Column, begin, finish, parser, show

KEY = ("what", "runs")
SETTLE_SECONDS = 3.0
MB = 1_000_000


def arguments() -> argparse.Namespace:
    """Return the parsed arguments."""
    made = parser(__doc__)
    add = made.add_argument
    add("--runs", type=int, default=5_000)
    add("--seconds", type=float, default=30.0, help="how long each state is watched")
    return made.parse_args()


def watched(running: Running, seconds: float) -> dict[str, float]:
    """Return what the fleet uses per second while nothing is to be done."""
    time.sleep(SETTLE_SECONDS)
    before = running.reading()
    time.sleep(seconds)
    after = running.reading()
    passed = after.at - before.at
    return {
        "worker_ms": (after.worker_cpu - before.worker_cpu) * 1000 / passed,
        "redis_ms": (after.redis.cpu - before.redis.cpu) * 1000 / passed,
        "commands": (after.redis.commands - before.redis.commands) / passed,
        "worker_mb": sum(after.worker_memory) / MB,
        "redis_mb": after.redis.memory / MB,
    }


def waiting(running: Running) -> int:
    """Return how many calls wait for a person."""
    return sum(running.store.zcard(key) for key in running.store.scan_iter("sf:*:asks"))


def decided(url: str) -> float:
    """Approve all by one command; return its seconds."""
    began = time.monotonic()
    command = [sys.executable, "-m", "stepfleet.orchestrator.cli", "decide", "--approve"]
    subprocess.run(
        [*command, "--tool", "look", "--yes"],
        check=True,
        env={**os.environ, "STEPFLEET_REDIS_URL": url},
        stdout=subprocess.DEVNULL,
    )
    return time.monotonic() - began


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what the idle and the waiting fleet use, and how long the decision takes."""
    with (
        tempfile.NamedTemporaryFile() as effects,
        fleet(Setup(variables={"EFFECTS": effects.name})) as running,
    ):
        made = Path(effects.name)
        running.warm()
        idle = watched(running, args.seconds)
        batch = running.client.submit_batch(lines(args.runs, 2), agent=asker)
        until(lambda: waiting(running) == args.runs, within=LONGEST)
        while_waiting = watched(running, args.seconds)
        early, began = made.stat().st_size, time.monotonic()
        seconds = decided(running.url)
        end = until(lambda: batch.progress().done == args.runs, within=LONGEST)
        progress, calls = batch.progress(), made.stat().st_size
        if early or (progress.completed, calls) != (args.runs, args.runs):
            raise RuntimeError(f"{early} calls were made early, {calls} in all: {progress}")
        used = (while_waiting["redis_mb"] - idle["redis_mb"]) * 1000 / args.runs
    return [
        {"what": "idle", "runs": 0, **idle},
        {"what": "waiting", "runs": args.runs, **while_waiting, "kb_per_run": used},
        {"what": "decided", "runs": args.runs, "decide": seconds, "done": end - began},
    ]


def main() -> None:
    """Measure, print, and write the files."""
    args = arguments()
    report = begin("approvals", args)
    for _ in range(args.repeat):
        for row in measure(args):
            report.add(row)
    show(
        "Per second: CPU in ms, commands of Redis; memory in MB",
        [one for one in report.rows if one["what"] != "decided"],
        KEY,
        [
            Column("what", "what"),
            Column("runs", "runs"),
            Column("worker ms", "worker_ms", 1, spread=True),
            Column("Redis ms", "redis_ms", 1, spread=True),
            Column("commands", "commands", 0, spread=True),
            Column("worker MB", "worker_mb", 0),
            Column("Redis kB per run", "kb_per_run", 1),
        ],
    )
    show(
        "Seconds: of the command that decides all, and until the last run has ended",
        [one for one in report.rows if one["what"] == "decided"],
        KEY,
        [
            Column("runs", "runs"),
            Column("decide", "decide", 1, spread=True),
            Column("done", "done", 1, spread=True),
        ],
    )
    finish(report, args, list)


if __name__ == "__main__":
    main()
