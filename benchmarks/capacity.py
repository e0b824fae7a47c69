"""What a fleet needs of Redis and of workers: measured costs, the formula, and simulated workers.

python benchmarks/capacity.py                       # about ten minutes
python benchmarks/capacity.py --repeat 3 --markdown # the tables of docs/how-to/capacity.md
python benchmarks/capacity.py --quick               # shows that it works; its figures say little

Measured, with a real Redis, real workers and a model server: the CPU of a step, of Redis with store
and broker in one and apart, its network and its memory; what workers and a keeper with nothing to
do cost, from fleets of `--idle` workers; what a message costs Redis for each other worker that it
wakes. Computed: `plan` of capacity_plan.py. Simulated: `--simulated` workers (simulated.py), with
nothing to do and with `--messages` per second; beside what the formula says of them. CPU is of
Redis as it counts it; all figures are medians of `--repeat`.
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import redis
import uvloop
from agents import runner
from capacity_tables import Table, costs, tables
from loads import LONGEST, Running, Setup, environment, fleet, lines, servers
from monitor import watching
from processes import ended, redis_server, until, workers
from readings import SECTIONS, RedisUse, usage_of
from repeats import Spread
from reports import Column, begin, finish, parser, show
from simulated import FETCH, Counts, Recording, SimulatedWorker, recording

from stepfleet import Fleet
from stepfleet.orchestrator.store.keys import KEEPERS, WORKERS

KEY = ("part", "what", "size")
QUEUE = "simulated"
SETTLE_SECONDS = 3.0
TRICKLE = 20
"""Runs submitted per second where messages are to wake workers."""
QUICK = {
    "runs": 20, "seconds": 2.0, "idle": [1, 2], "simulated": [2, 4], "lengths": [1, 3],
}  # fmt: skip


def arguments() -> argparse.Namespace:
    """Return the parsed arguments."""
    made = parser(__doc__)
    add = made.add_argument
    add("--runs", type=int, default=1000)
    add("--steps", type=int, default=4)
    add("--latency", type=float, default=1.0, help="seconds of a model call")
    add("--seconds", type=float, default=20.0, help="how long each state is watched")
    add("--idle", type=int, nargs="*", default=[1, 5, 10], help="real workers, two sizes at least")
    add("--lengths", type=int, nargs=2, default=[2, 20], help="steps of ended runs, for memory")
    add("--simulated", type=int, nargs="*", default=[10, 100, 1000])
    add("--messages", type=float, default=10.0, help="per second, to simulated workers")
    add("--quick", action="store_true", help="small sizes, whatever else is asked for")
    add("--again", metavar="FILE", help="measure nothing: the tables of what --json has written")
    add("--markdown", action="store_true", help="print the tables of the page")
    args = made.parse_args()
    if args.quick:
        vars(args).update(QUICK)
    return args


Use = dict[str, float]


def use(store: redis.Redis) -> Use:
    """Return what Redis has used and has now; `at` in seconds, `cpu` in ms, the rest in bytes."""
    found = store.info(*SECTIONS, "clients")
    return {
        "at": time.monotonic(),
        "cpu": RedisUse.of([found]).cpu * 1000,
        "received": float(found["total_net_input_bytes"]),
        "sent": float(found["total_net_output_bytes"]),
        "commands": float(found["total_commands_processed"]),
        "memory": float(found["used_memory"]),
        "connections": float(found["connected_clients"]),
    }


def per_second(before: Use, after: Use) -> Use:
    """Return the rates between two readings, by the names of `use`."""
    passed = after["at"] - before["at"]
    names = ("cpu", "received", "sent", "commands")
    return {name: (after[name] - before[name]) / passed for name in names}


def watched(store: redis.Redis, seconds: float) -> Use:
    """Return the rates of so many seconds, and what there is at their end."""
    before = use(store)
    time.sleep(seconds)
    after = use(store)
    return {**after, **per_second(before, after)}


def steps(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure a step with one Redis, and with two; and how often a busy worker fetches."""
    with fleet(Setup(1, args.runs, str(args.latency), stub=True)) as running:
        running.warm()
        before = use(running.store)
        cost = running.batch(args.runs, args.steps)
        after = use(running.store)
        net = {name: (after[name] - before[name]) / cost.steps for name in ("received", "sent")}
        yield {"what": "one Redis", **asdict(cost), **net}
    with fleet(Setup(1, args.runs, str(args.latency), stub=True)) as running:
        running.warm()
        with watching(running.url) as watch:
            cost = running.batch(args.runs, args.steps)
        fetches = sum(one.arguments[1:2] == (FETCH,) for one in watch.seen if not one.inside)
        yield {"what": "busy", "fetches": fetches / cost.wall, "rate": cost.rate}
    with redis_server() as (broker_url, _), redis.Redis.from_url(broker_url) as broker:
        variables = {"STEPFLEET_BROKER_URL": broker_url}
        setup = Setup(1, args.runs, str(args.latency), stub=True, variables=variables)
        with fleet(setup) as running:
            running.warm()
            before = use(broker)
            cost = running.batch(args.runs, args.steps)
            broker_ms = (use(broker)["cpu"] - before["cpu"]) / cost.steps
        yield {"what": "two", **asdict(cost), "broker_ms": broker_ms}


def memory(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure the bytes of ended runs of two lengths, and of runs whose call is under way."""
    for length in args.lengths:
        with fleet(Setup(1, args.runs, "0", stub=True)) as running:
            running.warm()
            before = running.reading().redis.memory
            running.batch(args.runs, length)
            taken = running.reading().redis.memory - before
            yield {"what": "ended", "size": length, "bytes": taken / args.runs}
    with fleet(Setup(1, args.runs, "30", stub=True)) as running:
        until(lambda: running.store.hlen(WORKERS) == 1)
        before = running.reading().redis.memory
        running.client.submit_batch(lines(args.runs, args.steps), agent=runner)
        until(lambda: in_hand(running) == args.runs, within=LONGEST)
        taken = running.reading().redis.memory - before
        yield {"what": "active", "size": 1, "bytes": taken / args.runs}


def in_hand(running: Running) -> int:
    """Return how many steps workers have under a lease."""
    return int(running.client.scale().in_hand)


def idle(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure fleets with nothing to do, then with few messages for all of their workers."""
    for size in args.idle:
        with fleet(Setup(size, 1000, "0", stub=True)) as running:
            bare = use(running.store)
            running.warm()
            until(lambda size=size: running.store.hlen(WORKERS) == size)  # type: ignore[misc]
            time.sleep(SETTLE_SECONDS)
            cpu = sum(one.cpu for one in usage_of(running.pids))
            found = watched(running.store, args.seconds)
            worker_ms = (sum(one.cpu for one in usage_of(running.pids)) - cpu) * 1000
            counts = {name: found[name] - bare[name] for name in ("connections", "memory")}
            yield {
                "what": "idle",
                "size": size,
                **found,
                **counts,
                "bytes": found["received"] + found["sent"],
                "worker_ms": worker_ms / size / args.seconds,
            }
            yield {"what": "woken", "size": size, **trickle(running, args.seconds)}


def trickle(running: Running, seconds: float) -> Use:
    """Return Redis's rates while single runs are submitted, `pushed` messages per second."""
    before, began = use(running.store), time.monotonic()
    many = int(seconds * TRICKLE)
    for number, one in enumerate(lines(many, 1)):
        time.sleep(max(0.0, began + number / TRICKLE - time.monotonic()))
        running.client.submit(runner, one["input"])
    after = use(running.store)
    until(lambda: running.client.overview().active == 0, within=LONGEST)
    return {**per_second(before, after), "pushed": many / (after["at"] - before["at"])}


def keeper(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure a keeper with nothing to do."""
    with redis_server() as (url, _), redis.Redis.from_url(url) as store:
        command = [sys.executable, "-m", "stepfleet.orchestrator.cli", "keeper", "--port", "0"]
        variables = {**os.environ, "STEPFLEET_REDIS_URL": url}
        quiet = subprocess.DEVNULL
        started = subprocess.Popen(command, env=variables, stdout=quiet, stderr=quiet, text=True)
        with ended(started) as process:
            until(lambda: store.hlen(KEEPERS))
            time.sleep(SETTLE_SECONDS)
            (before,) = usage_of([process.pid])
            found = watched(store, args.seconds)
            (after,) = usage_of([process.pid])
            worker_ms = (after.cpu - before.cpu) * 1000 / args.seconds
            yield {"what": "keeper", "size": 1, **found, "worker_ms": worker_ms}


@contextlib.contextmanager
def recorded(seconds: float) -> Iterator[tuple[redis.Redis, str, Recording]]:
    """Record a real worker with nothing to do; yield its Redis, which knows its scripts."""
    with (
        servers(Setup(stub=True)) as (url, served),
        Fleet(url) as client,
        redis.Redis.from_url(url) as store,
    ):
        with watching(url) as watch, workers(1, environment(url, served.url, 1000)) as pids:
            running = Running(url, client, store, served, tuple(pids))
            running.warm()
            time.sleep(SETTLE_SECONDS)
            whole, parts = store.time()
            began = whole + parts / 1e6
            time.sleep(seconds)
            (identity,) = (one.decode() for one in store.hkeys(WORKERS))
            (pid,) = pids
            held = psutil.Process(pid).net_connections("tcp")
            addresses = [f"{one.laddr.ip}:{one.laddr.port}" for one in held if one.raddr]
        yield store, url, recording(list(watch.seen), addresses, began, seconds, identity)


def simulated(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure Redis with simulated workers."""
    with recorded(max(args.seconds, 10.0)) as (store, url, made):
        for size in args.simulated:
            yield from uvloop.run(simulation(store, url, made, size, args))


async def simulation(
    store: redis.Redis, url: str, made: Recording, size: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measure Redis with so many simulated workers, first with nothing to do."""
    counts, bare = Counts(), use(store)
    crowd = [SimulatedWorker(made, number, counts, QUEUE) for number in range(size)]
    tasks = []
    for one in crowd:  # one after the other: so many connections at once would be refused
        tasks.append(asyncio.create_task(one.run(url)))
        await asyncio.sleep(0.005)
    found = []
    try:
        wanted = bare["connections"] + size * len(made.set_ups)
        async with asyncio.timeout(60 + size / 10):
            while use(store)["connections"] < wanted:  # noqa: ASYNC110 - Redis tells nobody
                await asyncio.sleep(0.2)
        await asyncio.sleep(made.seconds)  # each has sent all that it sends, reports among it
        for messages in (0.0, args.messages):
            counts.fetches = counts.taken = 0
            counts.late.clear()
            before, own = use(store), time.process_time()
            pushed = await push(store, messages, args.seconds)
            after = use(store)
            passed = after["at"] - before["at"]
            found.append(
                {
                    "what": "woken" if messages else "idle",
                    "size": size,
                    **after,
                    **per_second(before, after),
                    **{name: after[name] - bare[name] for name in ("connections", "memory")},
                    "messages": pushed / passed,
                    "fetches": counts.fetches / passed,
                    "taken": counts.taken,
                    "refused": counts.refused,
                    "driver": (time.process_time() - own) / passed,
                    "late_ms": Spread.of(counts.late or [0.0]).median * 1000,
                }
            )
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        store.delete(WORKERS, QUEUE)
    return found


async def push(store: redis.Redis, messages: float, seconds: float) -> int:
    """Push so many messages per second to the simulated workers; return how many."""
    pushed, began = 0, time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        if messages and passed >= pushed / messages:
            store.lpush(QUEUE, f"{pushed:0600}")
            pushed += 1
        await asyncio.sleep(min(1 / messages, 0.05) if messages else seconds - passed)
    return pushed


PARTS = {"step": steps, "memory": memory, "idle": idle, "keeper": keeper, "simulated": simulated}


def print_markdown(found: Sequence[Table]) -> None:
    """Print tables as a page has them."""
    for title, headings, rows in found:
        print(f"\n{title}\n")
        for row in (headings, ["---"] * len(headings), *rows):
            print(f"| {' | '.join(row)} |")


def main() -> None:
    """Measure, print, and write the files."""
    args = arguments()
    report = begin("capacity", args)
    if args.again:
        report.rows = json.loads(Path(args.again).read_text(encoding="utf-8"))["rows"]
    for _ in range(0 if args.again else args.repeat):
        for part, measure in PARTS.items():
            for row in measure(args):
                report.add({"part": part, "size": 1, **row})
    known = costs(report)
    report.details["costs"] = asdict(known)
    made = tables(report, known)
    report.details["tables"] = made
    if args.markdown:
        print_markdown(made)
    else:
        for title, headings, rows in made:
            shown = [dict(zip(headings, row, strict=True)) for row in rows]
            columns = [Column(heading, heading) for heading in headings]
            show(title, shown, headings[:1], columns)
    finish(report, args, list)


if __name__ == "__main__":
    main()
