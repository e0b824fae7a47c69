"""What a fleet needs: a formula over measured costs. Pure; `capacity.py` measures and prints."""

import math
from dataclasses import dataclass

DAY = 86_400.0
REDIS_SHARE = 0.8
"""Of a core that one Redis may use: it does its commands one after another."""
WORKER_SHARE = 0.7
"""Of a core that one worker process may use: above, answers wait for their turn."""
NODE_BYTES = 64e9
"""Data that one Redis holds, half of its machine's memory: a rewrite of its file may copy it."""
MOST_CONNECTIONS = 10_000
"""Redis's `maxclients`, unless it is set."""
LINK_BYTES = 1.25e9
"""Bytes per second of a network of 10 Gbit/s, in each direction."""


@dataclass(frozen=True)
class Costs:
    """What was measured. CPU in ms, memory and network in bytes.

    `worker_ms`, `redis_ms` (store and broker in one), `store_ms`, `broker_ms` (apart), `sent` and
    `received` (by Redis) are per step. `ended_base` and `ended_step` are bytes in Redis of an ended
    run and of each of its steps, `active` of one in hand. `idle_ms` and `idle_bytes` (both
    directions) per second, `connections` and `connected_bytes` are of Redis for each worker,
    `fleet_ms` per second for all together. `wake_ms` is Redis's for each other worker with free
    slots that a message wakes, at most `wakes` times per second and worker.
    """

    worker_ms: float
    redis_ms: float
    store_ms: float
    broker_ms: float
    sent: float
    received: float
    ended_base: float
    ended_step: float
    active: float
    idle_ms: float
    fleet_ms: float
    idle_bytes: float
    connections: float
    connected_bytes: float
    wake_ms: float
    wakes: float


@dataclass(frozen=True)
class Load:
    """What is to be done; `peak` is the busiest hour over the mean, `workers` 0 for as few as do.

    `call` is in seconds, `retention` in days.
    """

    runs_a_day: float
    steps: float = 4.0
    call: float = 5.0
    peak: float = 3.0
    workers: int = 0
    slots: int = 1000
    retention: float = 7.0


@dataclass(frozen=True)
class Plan:
    """What the load needs at its peak. Cores are of CPU, memory and network in bytes.

    `redis_cores` is of one Redis for store and broker, `store_cores` and `broker_cores` of two
    apart. `nodes` is how many masters the store needs, 1 for a plain Redis. `used` has the share of
    each limit of one Redis that is used, the first limit first: above 1 one Redis does not suffice.
    """

    rate: float
    in_flight: float
    by_cpu: int
    by_slots: int
    workers: int
    worker_cores: float
    redis_cores: float
    store_cores: float
    broker_cores: float
    memory: float
    connections: float
    network: float
    nodes: int
    used: tuple[tuple[str, float], ...]

    @property
    def one_redis(self) -> bool:
        """Whether one Redis suffices for store and broker."""
        return self.used[0][1] <= 1


def load_of_workers(workers: int, load: Load) -> Load:
    """Return the load whose peak keeps all slots of so many workers taken."""
    rate = workers * load.slots / load.call
    runs = rate * DAY / load.steps / load.peak
    return Load(runs, load.steps, load.call, load.peak, workers, load.slots, load.retention)


def plan(load: Load, costs: Costs) -> Plan:
    """Return what a load needs."""
    rate = load.runs_a_day * load.steps * load.peak / DAY
    in_flight = rate * load.call
    by_cpu = math.ceil(rate * costs.worker_ms / 1000 / WORKER_SHARE)
    by_slots = math.ceil(in_flight / load.slots)
    workers = load.workers or max(by_cpu, by_slots, 1)
    idle = (workers * costs.idle_ms + costs.fleet_ms) / 1000
    woken = workers * min(rate, costs.wakes) * costs.wake_ms / 1000
    store = rate * costs.store_ms / 1000 + idle
    broker = rate * costs.broker_ms / 1000 + woken
    one = rate * costs.redis_ms / 1000 + idle + woken
    ended = load.runs_a_day * load.retention * (costs.ended_base + load.steps * costs.ended_step)
    memory = ended + in_flight * costs.active + workers * costs.connected_bytes
    connections = workers * costs.connections
    network = rate * (costs.sent + costs.received) + workers * costs.idle_bytes
    limits = {
        "core": one / REDIS_SHARE,
        "memory": memory / NODE_BYTES,
        "connections": connections / MOST_CONNECTIONS,
        "network": network / LINK_BYTES,
    }
    nodes = max(1, math.ceil(store / REDIS_SHARE), math.ceil(memory / NODE_BYTES))
    return Plan(
        rate=rate,
        in_flight=in_flight,
        by_cpu=by_cpu,
        by_slots=by_slots,
        workers=workers,
        worker_cores=rate * costs.worker_ms / 1000,
        redis_cores=one,
        store_cores=store,
        broker_cores=broker,
        memory=memory,
        connections=connections,
        network=network,
        nodes=nodes,
        used=tuple(sorted(limits.items(), key=lambda one: -one[1])),
    )


def line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Return base and slope of the straight line nearest to the points (least squares)."""
    count = len(points)
    mean_x, mean_y = (sum(values) / count for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    return mean_y - slope * mean_x, slope
