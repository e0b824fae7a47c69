"""The cost of a step while a few or very many others wait for the same limit.

The limit admits nobody until all that are to wait are in its line, then `AT_ONCE` calls at a time.
Begun runs come before fresh ones: those that wait stay in line while the steps are measured.
"""

import time
from typing import Any

import redis
from agents import runner
from loads import LONGEST, Running, Setup, fleet, lines
from processes import until

from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.keys import NO_PREFIX

MODEL = "openai:benchmark"
AT_ONCE = 50
STEPS = 60
"""Steps of each run: longer than what is measured takes."""
CLOSED = {"in_flight": 1, "requests_per_minute": 1e-3}
SLOW_US = 1000


def measure(waiting: int, measured: int, *, wipe: bool = False) -> dict[str, Any]:
    """Measure `measured` steps while so many wait. With `wipe` the line is lost, then made anew."""
    with fleet(Setup(stub=True)) as on:
        on.warm()
        on.client.limits.set(MODEL, **CLOSED)
        store = on.store
        before = on.reading()
        started = time.monotonic()
        batch = on.client.submit_batch(lines(waiting + AT_ONCE, STEPS), agent=runner)
        goal = waiting + AT_ONCE - 1
        filled = until(lambda: in_line(store) >= goal, within=LONGEST) - started
        entered = on.cost(before, waiting, time.monotonic())
        held = sum(int(store.memory_usage(key, samples=50) or 0) for key in limit_keys(store))
        watch(store)
        on.client.limits.set(MODEL, requests_per_minute=1e9, in_flight=AT_ONCE)
        until(lambda: batch.progress().steps >= AT_ONCE, within=LONGEST)
        before, begun = on.reading(), batch.progress().steps
        end = until(lambda: batch.progress().steps >= begun + measured, within=LONGEST)
        cost = on.cost(before, batch.progress().steps - begun, end)
        left, slowest = in_line(store), slowest_ms(store)
        rebuilt = rebuild(on, left) if wipe else {}
        batch.cancel()
    return {
        "scene": "waiting",
        "waiting": waiting,
        "left": left,
        "worker_ms": cost.worker_ms,
        "redis_ms": cost.redis_ms,
        "commands": cost.commands,
        "slowest_ms": slowest,
        "bytes": held / waiting,
        "enter_commands": entered.commands,
        "enter_seconds": filled,
        **rebuilt,
    }


def rebuild(on: Running, waiting: int) -> dict[str, Any]:
    """Remove all keys of limits; return how long it takes until the line is there again."""
    watch(on.store)
    started = time.monotonic()
    on.store.delete(*limit_keys(on.store))
    end = until(lambda: in_line(on.store) >= 0.95 * waiting, within=LONGEST)
    return {"rebuild_seconds": end - started, "rebuild_slowest_ms": slowest_ms(on.store)}


def in_line(store: redis.Redis) -> int:
    """Return how many steps wait."""
    return int(store.hlen(NO_PREFIX.of(keys.LIMIT_WAITING)))


def limit_keys(store: redis.Redis) -> list[bytes]:
    """Return the names of all keys of limits."""
    return list(store.scan_iter("sf:{limits}:*", count=1000))


def watch(store: redis.Redis) -> None:
    """Have Redis note from now on which commands take long."""
    store.config_set("slowlog-log-slower-than", SLOW_US)
    store.config_set("slowlog-max-len", 10_000)
    store.slowlog_reset()


def slowest_ms(store: redis.Redis) -> float:
    """Return how long the slowest script took since `watch`, in ms; 0 below one."""
    scripts = (b"EVALSHA", b"EVAL")
    found = (one for one in store.slowlog_get(10_000) if one["command"].startswith(scripts))
    return max((float(one["duration"]) / 1000 for one in found), default=0.0)
