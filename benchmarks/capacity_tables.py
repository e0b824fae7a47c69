"""The tables of capacity: measured costs, what simulated workers cost, and plans. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from capacity_plan import Costs, Load, Plan, line, load_of_workers, plan
from repeats import Spread
from reports import Report, values

RUNS_A_DAY = ((1e6, 7.0), (1e8, 7.0), (1e8, 1.0))
"""Loads of the page: runs a day, and days for which ended ones are kept."""
FLEETS = (10, 100, 1000)
LATE_MS = 1000.0
"""Simulated workers that are later than this do not send what they should: the machine is busy."""

Table = tuple[str, Sequence[str], list[list[str]]]


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
        wakes=max(median("step", "busy", "fetches"), median("idle", "woken", "pushed")),
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


def tables(report: Report, known: Costs) -> list[Table]:
    """Return the titles, headings and rows of the page's tables."""
    kept = Load(0, retention=1.0)
    fleets = {f"{size:,} workers": load_of_workers(size, kept) for size in FLEETS}
    days = {
        f"{runs / 1e6:,.0f} M, {days:.0f} d": Load(runs, retention=days)
        for runs, days in RUNS_A_DAY
    }
    return [
        ("Measured", ("cost", "figure"), measured(report, known)),
        (
            "Simulated workers: formula, measured",
            ("workers", "Redis ms/s", "connections", "MB", "MB/s", "fetches/s", "driver's cores"),
            [beside(row, known) for row in report.rows if row["part"] == "simulated"],
        ),
        (
            "Computed: all slots of so many workers taken",
            ("at the peak", *fleets),
            planned(plan(load, known) for load in fleets.values()),
        ),
        (
            "Computed: runs a day, ended ones kept for so many days",
            ("at the peak", *days),
            planned(plan(load, known) for load in days.values()),
        ),
    ]


def measured(report: Report, known: Costs) -> list[list[str]]:
    """Return the rows of the measured costs, with the spread of a step's."""
    rows = [one for one in report.rows if one["what"] == "one Redis"]
    keepers = [one for one in report.rows if one["part"] == "keeper"]
    own, redis = (Spread.of(values(keepers, name)).median for name in ("worker_ms", "cpu"))
    figures = {
        "a step: CPU of a worker, ms": Spread.of(values(rows, "worker_ms")).shown(2),
        "a step: CPU of one Redis, ms": Spread.of(values(rows, "redis_ms")).shown(3),
        "a step, two: store, broker, ms": f"{known.store_ms:.3f}, {known.broker_ms:.3f}",
        "a step: to Redis, from Redis, kB": pair(known.received / 1e3, known.sent / 1e3),
        "an ended run, each of its steps, kB": pair(known.ended_base / 1e3, known.ended_step / 1e3),
        "a run in hand, kB": f"{known.active / 1e3:.1f}",
        "idle, Redis: fleet, each worker, ms/s": pair(known.fleet_ms, known.idle_ms),
        "idle, each worker: connections": f"{known.connections:.0f}",
        "idle, each worker: Redis's memory, network/s, kB": pair(
            known.connected_bytes / 1e3, known.idle_bytes / 1e3
        ),
        "a message: Redis, for each worker it wakes, ms": f"{known.wake_ms:.3f}",
        "a worker: fetches/s seen": f"{known.wakes:.0f}",
        "a keeper: its CPU, Redis's, ms/s": pair(own, redis),
    }
    return [[name, figure] for name, figure in figures.items()]


def pair(one: float, other: float) -> str:
    """Return two figures as a cell."""
    return f"{one:,.2f}, {other:,.2f}"


def beside(row: Mapping[str, Any], known: Costs) -> list[str]:
    """Return a row of simulated workers: what the formula says, and what was measured."""
    says = predicted(row, known)
    late = ", late" if row["late_ms"] > LATE_MS else ""
    what = f"{row['messages']:.0f} messages/s" if row["messages"] else "idle"
    return [
        f"{row['size']:,}, {what}{late}",
        f"{says['cpu']:.0f}, {row['cpu']:.0f}",
        f"{says['connections']:,.0f}, {row['connections']:,.0f}",
        f"{says['memory'] / 1e6:.1f}, {row['memory'] / 1e6:.1f}",
        f"{says['bytes'] / 1e6:.2f}, {(row['sent'] + row['received']) / 1e6:.2f}",
        f"{row['fetches']:,.0f}",
        f"{row['driver']:.2f}",
    ]


def planned(plans: Iterable[Plan]) -> list[list[str]]:
    """Return plans as rows, one for each quantity, or for two."""
    columns = [
        {
            "steps/s, calls at once": f"{one.rate:,.0f}, {one.in_flight:,.0f}",
            "workers, by CPU, by slots": f"{one.by_cpu:,}, {one.by_slots:,}",
            "cores: workers, one Redis": pair(one.worker_cores, one.redis_cores),
            "cores: store, broker": pair(one.store_cores, one.broker_cores),
            "Redis GB, connections": f"{one.memory / 1e9:,.1f}, {one.connections:,.0f}",
            "network MB/s, masters": f"{one.network / 1e6:,.1f}, {one.nodes:,}",
            "first limits of one Redis": ", ".join(f"{what} {of:.0%}" for what, of in one.used[:2]),
        }
        for one in plans
    ]
    return [[name, *(column[name] for column in columns)] for name in columns[0]]
