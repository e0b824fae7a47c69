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
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import psutil
import redis
import uvloop
from agents import runner
from capacity_plan import Costs, Load, Plan, line, load_of_workers, plan
from loads import LONGEST, Running, Setup, environment, fleet, lines, servers
from monitor import watching
from processes import ended, redis_server, until, workers
from readings import SECTIONS, RedisUse, usage_of
from repeats import Spread
from reports import Column, Report, begin, finish, parser, show, values
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
DAYS = (1e6, 1e8)
FLEETS = (10, 100, 1000)


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
    with fleet(Setup(1, args.runs, "0", stub=True)) as running:
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


def costs(report: Report) -> Costs:
    """Return the costs of the medians of what was measured."""

    def median(part: str, what: str, name: str, size: float | None = None) -> float:
        rows = [one for one in report.rows if (one["part"], one["what"]) == (part, what)]
        kept = [one for one in rows if size is None or one["size"] == size]
        return Spread.of(values(kept, name)).median

    def fitted(part: str, what: str, name: str) -> tuple[float, float]:
        rows = (one for one in report.rows if (one["part"], one["what"]) == (part, what))
        sizes = sorted({one["size"] for one in rows})
        return line([(size, median(part, what, name, size)) for size in sizes])

    ended_base, ended_step = fitted("memory", "ended", "bytes")
    fleet_ms, idle_ms = fitted("idle", "idle", "cpu")
    _, woken_ms = fitted("idle", "woken", "cpu")
    return Costs(
        worker_ms=median("step", "one Redis", "worker_ms"),
        redis_ms=median("step", "one Redis", "redis_ms"),
        store_ms=median("step", "two", "redis_ms"),
        broker_ms=median("step", "two", "broker_ms"),
        sent=median("step", "one Redis", "sent"),
        received=median("step", "one Redis", "received"),
        ended_base=max(ended_base, 0.0),
        ended_step=ended_step,
        active=median("memory", "active", "bytes"),
        idle_ms=max(idle_ms, 0.0),
        fleet_ms=max(fleet_ms, 0.0),
        idle_bytes=max(fitted("idle", "idle", "bytes")[1], 0.0),
        connections=fitted("idle", "idle", "connections")[1],
        connected_bytes=max(fitted("idle", "idle", "memory")[1], 0.0),
        wake_ms=max(woken_ms - idle_ms, 0.0) / median("idle", "woken", "pushed"),
        wakes=median("step", "busy", "fetches"),
    )


def predicted(row: Mapping[str, Any], known: Costs) -> dict[str, float]:
    """Return what the formula says of a fleet of simulated workers."""
    size = row["size"]
    woken = size * min(row["messages"], known.wakes) * known.wake_ms
    return {
        "cpu": known.fleet_ms + size * known.idle_ms + woken,
        "connections": size * known.connections,
        "memory": size * known.connected_bytes,
        "bytes": size * known.idle_bytes,
    }


Table = tuple[str, Sequence[str], list[list[str]]]


def tables(report: Report, known: Costs) -> list[Table]:
    """Return the titles, headings and rows of the page's tables."""
    found = [one for one in report.rows if one["part"] == "simulated"]
    beside = []
    for row in found:
        says = predicted(row, known)
        beside.append(
            [
                f"{row['size']:,}, {row['what']}",
                f"{says['cpu']:.0f}, {row['cpu']:.0f}",
                f"{says['connections']:,.0f}, {row['connections']:,.0f}",
                f"{says['memory'] / 1e6:.1f}, {row['memory'] / 1e6:.1f}",
                f"{says['bytes'] / 1e6:.2f}, {(row['sent'] + row['received']) / 1e6:.2f}",
                f"{row['fetches']:,.0f}",
                f"{row['driver']:.2f}, {row['late_ms']:.0f}",
            ]
        )
    spreads = spread_of_steps(report)
    (kept,) = [one for one in report.rows if one["part"] == "keeper"][-1:]
    return [
        (
            "Measured",
            ("cost", "figure"),
            [
                ["a step: worker CPU, ms", spreads["worker_ms"]],
                ["a step: Redis CPU, ms, store and broker in one", spreads["redis_ms"]],
                ["the same apart: store, broker", f"{known.store_ms:.3f}, {known.broker_ms:.3f}"],
                ["a step: kB to Redis, from Redis",
                 f"{known.received / 1e3:.1f}, {known.sent / 1e3:.1f}"],
                ["an ended run: kB, and for each step",
                 f"{known.ended_base / 1e3:.1f}, {known.ended_step / 1e3:.2f}"],
                ["a run in hand: kB", f"{known.active / 1e3:.1f}"],
                ["idle: Redis ms per second, of the fleet, and per worker",
                 f"{known.fleet_ms:.1f}, {known.idle_ms:.2f}"],
                ["a worker: connections, MB in Redis, kB per second",
                 f"{known.connections:.0f}, {mb(known.connected_bytes)}, {kb(known.idle_bytes)}"],
                ["a message: Redis ms per worker that it wakes", f"{known.wake_ms:.3f}"],
                ["a busy worker: fetches per second, at most", f"{known.wakes:.0f}"],
                ["a keeper: own CPU, Redis CPU, ms per second",
                 f"{kept['worker_ms']:.1f}, {kept['cpu']:.1f}"],
            ],
        ),
        (
            "Simulated workers: formula, measured",
            ("workers", "Redis ms/s", "connections", "MB", "MB/s", "fetches/s", "driver, late ms"),
            beside,
        ),
        ("Computed: workers with all slots taken", PLAN_HEADINGS, [
            [f"{size:,} workers", *planned(plan(load_of_workers(size, Load(0)), known))]
            for size in FLEETS
        ]),
        ("Computed: runs a day", PLAN_HEADINGS, [
            [f"{one.runs_a_day / 1e6:,.0f} M, {one.retention:.0f} days", *planned(plan(one, known))]
            for one in (Load(runs, retention=days) for runs in DAYS for days in (7.0, 1.0))
        ]),
    ]  # fmt: skip


PLAN_HEADINGS = (
    *("load", "steps/s", "in flight", "workers by CPU, slots", "worker cores", "Redis cores"),
    *("store, broker", "memory GB", "connections", "MB/s", "nodes", "first limits"),
)


def kb(size: float) -> str:
    """Return bytes in kB, for a cell."""
    return f"{size / 1e3:.2f}"


def mb(size: float) -> str:
    """Return bytes in MB, for a cell."""
    return f"{size / 1e6:.2f}"


def planned(made: Plan) -> list[str]:
    """Return the cells of a plan."""
    return [
        f"{made.rate:,.0f}",
        f"{made.in_flight:,.0f}",
        f"{made.by_cpu}, {made.by_slots}",
        f"{made.worker_cores:.1f}",
        f"{made.redis_cores:.2f}",
        f"{made.store_cores:.2f}, {made.broker_cores:.2f}",
        f"{made.memory / 1e9:,.1f}",
        f"{made.connections:,.0f}",
        f"{made.network / 1e6:,.1f}",
        str(made.nodes),
        ", ".join(f"{name} {used:.0%}" for name, used in made.used[:2]),
    ]


def spread_of_steps(report: Report) -> dict[str, str]:
    """Return the medians of a step's CPU, with their spread."""
    rows = [one for one in report.rows if one["what"] == "one Redis"]
    digits = {"worker_ms": 2, "redis_ms": 3}
    return {name: Spread.of(values(rows, name)).shown(many) for name, many in digits.items()}


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
    for _ in range(args.repeat):
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
