"""The formula of capacity, and what a simulated worker repeats of a recorded one."""

from dataclasses import replace
from typing import Any

import pytest
from support.benchmarks import benchmark

plans, simulated, monitor = (benchmark(name) for name in ("capacity_plan", "simulated", "monitor"))
Load, plan, load_of_workers = plans.Load, plans.plan, plans.load_of_workers

COSTS = plans.Costs(
    worker_ms=1.0,
    redis_ms=0.2,
    store_ms=0.18,
    broker_ms=0.05,
    sent=2000.0,
    received=3000.0,
    ended_base=1000.0,
    ended_step=500.0,
    active=5000.0,
    idle_ms=0.5,
    fleet_ms=3.0,
    idle_bytes=1000.0,
    connections=9.0,
    connected_bytes=100_000.0,
    wake_ms=0.05,
    wakes=100.0,
)


def test_a_small_fleet_needs_one_worker_and_one_redis() -> None:
    found = plan(Load(runs_a_day=1e6, retention=1.0), COSTS)

    assert found.rate == pytest.approx(138.9, abs=0.1)
    assert found.in_flight == pytest.approx(5 * found.rate)
    assert (found.workers, found.by_cpu, found.by_slots, found.nodes) == (1, 1, 1, 1)
    assert found.redis_cores == pytest.approx(0.2 * 0.1389 + 0.0035 + 100 * 0.05 / 1000, abs=1e-4)
    assert found.memory == pytest.approx(3e9 + 694 * 5000 + 1e5, rel=1e-3)
    assert found.one_redis


@pytest.mark.parametrize(
    ("load", "first", "nodes"),
    [
        (Load(1e8, retention=7.0), "memory", 33),
        (Load(1e8, retention=0.01), "core", 4),
        (Load(1e6, retention=0.01, workers=1200, slots=1), "core", 1),
    ],
)
def test_the_first_limit_is_the_one_that_is_used_most(load: Any, first: str, nodes: int) -> None:
    found = plan(load, COSTS)

    assert (found.used[0][0], found.nodes) == (first, nodes)
    assert not found.one_redis


def test_connections_limit_many_workers_where_messages_wake_nobody() -> None:
    quiet = replace(COSTS, wake_ms=0.0, idle_ms=0.01)

    found = plan(Load(1e6, retention=0.01, workers=1200), quiet)

    assert found.used[0] == ("connections", pytest.approx(1.08))


def test_the_load_of_workers_takes_all_of_their_slots() -> None:
    found = plan(load_of_workers(100, Load(0)), COSTS)

    assert found.in_flight == pytest.approx(100_000)
    assert (found.by_slots, found.workers) == (100, 100)


def test_a_line_fits_points() -> None:
    assert plans.line([(1, 5.0), (5, 13.0), (10, 23.0)]) == pytest.approx((3.0, 2.0))


def seen(at: float, *words: str, by: str = "h:1") -> Any:
    text = " ".join(f'"{word}"' for word in words).encode()
    return monitor.Seen(at, by, words[0].lower(), text)


FETCH = ("EVALSHA", simulated.FETCH.decode(), "1", "q", "i", "u", "z", "sf:given-up:f", "f:1")
TRACK = ("CLIENT", "TRACKING", "ON", "REDIRECT", "7", "NOLOOP")


def test_a_recording_knows_which_work_depends_on_a_reply() -> None:
    commands = [
        seen(1.0, "SUBSCRIBE", "__redis__:invalidate", by="h:2"),
        seen(1.1, "HELLO", "3", "AUTH", "(redacted)", "(redacted)"),
        seen(1.2, *TRACK),
        seen(1.3, *FETCH),
        seen(10.0, "SET", "sf:upkeep", "1", "NX", "PX", "5000"),
        seen(10.001, "TIME"),
        seen(10.0011, "ZCARD", "a"),
        seen(10.002, "ZRANGE", "sf:follow-ups", "0", "1"),
        seen(12.0, "GET", "sf:scale"),
        seen(12.001, "ZCARD", "b"),
        seen(12.002, "SET", "sf:scale", "{}", "PX", "8000"),
        seen(12.003, "LLEN", "q"),
        seen(30.0, "LLEN", "late"),
    ]

    found = simulated.recording(commands, ["h:1", "h:2"], 9.0, 20.0, "host:1")

    first, second = found.bursts
    assert [(part.gated, [len(one) for one in part.trips]) for part in first.parts] == [
        (False, [1]),
        (True, [2]),
        (False, [1]),
    ]
    assert [(part.gated, part.trips[-1][-1][1]) for part in second.parts] == [
        (False, b"sf:scale"),
        (True, b"sf:scale"),
        (False, b"q"),
    ]
    assert found.set_ups[found.fetching][0] == (b"HELLO", b"3")
    assert found.set_ups[found.ear] == ((b"SUBSCRIBE", b"__redis__:invalidate"),)
    assert found.fetch[3] == b"q"


@pytest.mark.parametrize(
    ("gate", "reply", "due"),
    [
        ((b"GET", b"sf:scale"), None, True),
        ((b"GET", b"sf:scale"), b"{}", False),
        ((b"SET", b"sf:upkeep"), b"OK", True),
        ((b"SET", b"sf:upkeep"), None, False),
        ((b"EVALSHA", b"turn"), [1, 5], True),
        ((b"EVALSHA", b"turn"), [0, 5], False),
    ],
)
def test_work_is_due_where_redis_says_so(gate: Any, reply: object, due: bool) -> None:
    assert simulated.is_due(gate, reply) is due
