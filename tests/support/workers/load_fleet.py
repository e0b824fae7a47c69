"""A fleet under load for tests: many short runs, a few workers, and what can be counted of them.

Starts and stops; what the counts must be is the tests' business.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import redis
from support.deadlines import wait_until
from support.servers.redis_servers import RedisServer, short_folder
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Agent, Batch, Fleet
from stepfleet.worker.testing.server import ModelServer

CALM = {
    "STEPFLEET_LEASE": "10",
    "STEPFLEET_GRACE": "2",
    "STEPFLEET_RESCUE_INTERVAL": "0.5",
    "STEPFLEET_SLOTS": "100",
}
_SHARDS = 16


@dataclass
class LoadFleet:
    """A Redis, a model, workers that come and go, and a client."""

    folder: Path
    server: RedisServer
    model: ModelServer
    fleet: Fleet
    env: dict[str, str]
    workers: list[FleetWorker] = field(default_factory=list)
    births: Iterator[int] = field(default_factory=itertools.count)
    """Numbers of workers: a dead one's name, which its runs still have, is never used again."""
    deaths: int = 0

    def start(self, *options: str, count: int = 1) -> None:
        """Start workers; return when all consume."""
        names = [f"load{next(self.births)}" for _ in range(count)]
        started = [self._worker(name, options).launch() for name in names]
        self.workers += started
        for worker in started:
            wait_until(partial(_is_ready, worker), within=60, what=f"{worker.name} ready")

    def replace_dead(self, *options: str) -> None:
        """Start a worker for each that has ended, and count it."""
        dead = [worker for worker in self.workers if worker.exit_code is not None]
        for _ in dead:
            name = f"load{next(self.births)}"
            self.workers.append(self._worker(name, options).launch())
        self.workers = [one for one in self.workers if one not in dead]
        self.deaths += len(dead)

    @contextlib.contextmanager
    def nursed(self, *options: str) -> Iterator[None]:
        """Meanwhile start a worker for each that ends."""
        ended = threading.Event()

        def nurse() -> None:
            while not ended.wait(0.1):
                self.replace_dead(*options)

        nursing = threading.Thread(target=nurse, daemon=True)
        nursing.start()
        try:
            yield
        finally:
            ended.set()
            nursing.join(timeout=60)

    def submit(self, agent: Agent, keys: list[str]) -> tuple[Batch, float]:
        """Submit a run of each key; return the batch, and the runs that were created per second."""
        began = time.monotonic()
        batch = self.fleet.submit_batch([{"id": key, "input": key} for key in keys], agent=agent)
        return batch, len(keys) / (time.monotonic() - began)

    def put_off(self) -> int:
        """Count the runs that the rescuer has left in a long queue."""
        with self.client() as client:
            later = int(client.time()[0]) * 1000 + 10**9
            asked = client.pipeline(transaction=False)
            for shard in range(_SHARDS):
                asked.zcount(f"sf:{{s{shard:02d}}}:due", later, "+inf")
            return sum(asked.execute())

    def client(self) -> "redis.Redis":
        return redis.Redis.from_url(self.server.url, decode_responses=True)

    def dropped(self) -> int:
        """Count the deliveries that found nothing to do, as the workers log them."""
        return sum(worker.log.count("dropped: ") for worker in self.workers)

    def _worker(self, name: str, options: tuple[str, ...]) -> FleetWorker:
        url = self.server.url
        return FleetWorker(
            self.folder, url, self.model.url, name=name, env=self.env, options=options
        )


def _is_ready(worker: FleetWorker) -> bool:
    assert worker.exit_code is None, f"{worker.name} ended at its start:\n{worker.log}"
    return f"{worker.name} ready." in worker.log


@contextlib.contextmanager
def load_fleet(
    server: RedisServer, model: ModelServer, agents: Path, **env: str
) -> Iterator[LoadFleet]:
    """Open a client on `server`; end all workers afterwards."""
    with short_folder() as folder, Fleet(server.url) as fleet:
        given = {**CALM, "STEPFLEET_AGENTS": str(agents), **env}
        load = LoadFleet(folder, server, model, fleet, given)
        try:
            yield load
        finally:
            for worker in load.workers:
                worker.end()
