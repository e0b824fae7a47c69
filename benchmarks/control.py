"""Requests to a whole batch: when they hold, when every run knows, and what they cost.

python benchmarks/control.py                        # 100k runs
python benchmarks/control.py --runs 10000 --only pause resume

No worker runs. `in force` is the time until the request lies on all shards, so that no step of the
batch begins, and the first page of runs knows. `all` is the time until all runs' own records and
the counters say so too. The longest call of a script is Redis's own account (slow log), so without
the way there and back; on a busy machine it holds the time in which Redis did not run. `ping` is
what another process meanwhile waits for a PING every two milliseconds; `idle` is the same before.
`messages` is how many lie in the broker's queue afterwards.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from agents import runner
from loads import lines
from processes import redis_server
from redis import Redis
from reports import Column, Report, begin, finish, parser, progress, show

from stepfleet import AsyncBatch, AsyncFleet
from stepfleet.orchestrator.settings.settings import QUEUE

RUNS = 100_000
VERBS = ("pause", "resume", "cancel", "retry")
LOGGED_MICROSECONDS = 200
PING_SECONDS = 0.002
IDLE_SECONDS = 3.0


def arguments() -> argparse.Namespace:
    """Return the parsed arguments."""
    made = parser(__doc__)
    made.add_argument("--runs", type=int, default=RUNS)
    made.add_argument("--only", nargs="*", choices=VERBS, default=list(VERBS))
    return made.parse_args()


async def measure(args: argparse.Namespace, report: Report) -> None:
    """Submit a batch and ask everything of it, one after the other."""
    with redis_server() as (url, _), Redis.from_url(url) as client:
        client.config_set("slowlog-max-len", 100_000)
        async with AsyncFleet(url) as fleet:
            batch = await fleet.submit_batch(lines(args.runs, 1), runner)
            with pinged(url) as waits:
                await asyncio.sleep(IDLE_SECONDS)
            report.details["idle"] = spread(waits)
            for verb in VERBS:
                if verb in args.only:
                    report.add(await one(verb, batch, client, args.runs, url))


async def one(verb: str, batch: AsyncBatch, client: "Redis", runs: int, url: str) -> dict[str, Any]:
    """Ask one thing; return what it took as a row (seconds, milliseconds)."""
    client.slowlog_reset()
    client.config_set("slowlog-log-slower-than", LOGGED_MICROSECONDS)
    in_force: list[float] = []
    started, cpu = 0.0, 0.0

    def on_progress(_: int) -> None:
        in_force.append(time.monotonic() - started)

    with pinged(url) as waits:
        started, cpu = time.monotonic(), time.process_time()
        if verb == "retry":
            reached = await batch.retry(failed_only=False)
        else:
            reached = await getattr(batch, verb)(on_progress)
        seconds, used = time.monotonic() - started, time.process_time() - cpu
    client.config_set("slowlog-log-slower-than", -1)
    slow = [entry["duration"] for entry in client.slowlog_get(100_000)]
    return {
        "verb": verb,
        "runs": runs,
        "reached": reached,
        "in_force": in_force[0] if in_force else seconds,
        "seconds": seconds,
        "cpu": used,
        "cpu_us": used / runs * 1e6,
        "longest_ms": max(slow, default=0) / 1000,
        "messages": client.llen(QUEUE),
        **spread(waits),
    }


@contextmanager
def pinged(url: str) -> Iterator[list[float]]:
    """Give the milliseconds that another process waits for each PING; there are some behind it."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=ping, args=(url, theirs))
    process.start()
    ours.recv()
    waits: list[float] = []
    try:
        yield waits
    finally:
        ours.send("end")
        waits += ours.recv()
        process.join()


def ping(url: str, told: Connection) -> None:
    """Ping until told to end, then tell the milliseconds of each."""
    waits = []
    with Redis.from_url(url) as client:
        client.ping()
        told.send("ready")
        while not told.poll(PING_SECONDS):
            began = time.perf_counter()
            client.ping()
            waits.append((time.perf_counter() - began) * 1000)
    told.send(waits)


def spread(waits: list[float]) -> dict[str, float]:
    """Return median, 99th percentile and maximum."""
    waits = waits if len(waits) > 1 else [0.0, *waits, 0.0]
    parts = statistics.quantiles(waits, n=100, method="inclusive")
    return {"ping_p50": parts[49], "ping_p99": parts[98], "ping_max": max(waits)}


def main() -> None:
    """Measure and print."""
    args = arguments()
    report = begin("control", args)
    for _ in range(args.repeat):
        asyncio.run(measure(args, report))
    show(
        "Requests to a whole batch",
        report.rows,
        ("verb", "runs"),
        [
            Column("request", "verb"),
            Column("runs", "runs"),
            Column("in force s", "in_force", 2, spread=True),
            Column("all s", "seconds", 1, spread=True),
            Column("client CPU s", "cpu", 1),
            Column("CPU us/run", "cpu_us", 0),
            Column("longest script ms", "longest_ms", 1),
            Column("ping p50 ms", "ping_p50", 1),
            Column("p99 ms", "ping_p99", 1),
            Column("max ms", "ping_max", 1),
            Column("messages", "messages", 0),
        ],
    )
    idle = ", ".join(f"{value:.1f}" for value in report.details["idle"].values())
    progress.print(f"ping ms while nothing is asked (p50, p99, max): {idle}")
    finish(report, args, list)


if __name__ == "__main__":
    main()
