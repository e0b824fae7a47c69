"""One chaos run: a schedule of events drawn from a seed, applied to a fleet while it works.

Knows how to hit; what came of it is the recount's business.
"""

import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import redis
from support.chaos.clients import Meddler
from support.chaos.courier import BROKER_KEYS, HEAVY, READ, Courier
from support.chaos.fleet import ChaosWorkers, RecoveryWatch
from support.chaos.plan import plan_of
from support.chaos.recount import await_upkeep
from support.deadlines import wait_until
from support.servers.redis_servers import RedisServer
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Agent, Fleet
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Faults, Reply, ToolCallReply

LEASE = 2.0
PLACES = ("waiting", "grants")
"""Where a run is that waits for limits, or has a grant."""
WORKER = {
    "STEPFLEET_LEASE": str(LEASE),
    "STEPFLEET_GRACE": "1",
    "STEPFLEET_RESCUE_INTERVAL": "0.5",
    "STEPFLEET_SLOTS": "50",
    "STEPFLEET_DRAIN": "1",
    "STEPFLEET_POISON_LIMIT": "50",  # the kills are ours, not the runs'
}
FAULTS = Faults(
    rate=0.2,
    kinds=dict.fromkeys(("server_error", "rate_limited", "broken_json", "reset"), 1.0),
    first_attempts=3,
    retry_after=0.1,
)


@dataclass(frozen=True)
class Size:
    """How large a chaos run is. `pace` is seconds between events, `latency` of model calls."""

    seed: int = 1
    runs: int = 60
    workers: int = 3
    kills: int = 6
    stops: int = 2
    rolls: int = 1
    redis_kills: int = 1
    redis_terms: int = 1
    wipes: int = 2
    losses: int = 0
    pace: float = 0.8
    latency: float = 0.4

    @classmethod
    def from_environment(cls, **given: float) -> Self:
        """Take `CHAOS_SEED`, `CHAOS_RUNS`, `CHAOS_KILLS`, ... over what is given."""
        sizes: dict[str, Any] = dict(given)
        for one in fields(cls):
            if text := os.environ.get(f"CHAOS_{one.name.upper()}"):
                sizes[one.name] = float(text) if one.type is float else int(text)
        return cls(**sizes)

    @property
    def schedule(self) -> list[str]:
        """The events in the order that the seed gives."""
        events = ["kill"] * self.kills + ["stop"] * self.stops + ["roll"] * self.rolls
        events += ["redis-kill"] * self.redis_kills + ["redis-term"] * self.redis_terms
        events += ["wipe"] * self.wipes + ["loss"] * self.losses
        random.Random(self.seed).shuffle(events)
        return events


def scripted(latency: float) -> Callable[[RequestRecord], Reply]:
    """Return the model's rules: every conversation follows its plan."""

    def rules(request: RequestRecord) -> Reply:
        plan = plan_of(request.key)
        seconds = latency * (0.25 + 1.5 * plan.seconds[min(request.turn, plan.steps) - 1])
        if request.turn > len(plan.turns):
            return Reply(plan.answer, latency=seconds)
        asked = plan.turns[request.turn - 1]
        calls = tuple(ToolCallReply(tool, {"what": what}) for tool, what in asked)
        return Reply(tool_calls=calls, latency=seconds)

    return rules


class ChaosRun:
    """A fleet on a Redis of its own, and everything that happens to it.

    `lose` makes the Redis lose what it had acknowledged; all batches are then submitted again.
    """

    def __init__(
        self,
        size: Size,
        server: RedisServer,
        launch: Callable[[str], FleetWorker],
        lose: Callable[[], None] | None = None,
    ) -> None:
        self.size = size
        self._lose = lose
        self._orders: list[tuple[list[dict[str, str]], Agent]] = []
        self.happened: Counter[str] = Counter()
        self.keys: list[str] = []
        self._server = server
        self._draw = random.Random(size.seed + 1)
        self._stack = contextlib.ExitStack()
        enter = self._stack.enter_context
        ahead = 50 * size.workers
        self.courier = enter(Courier(server.url, size.seed, lost=0.1, twice=0.3, ahead=ahead))
        self.watch = enter(RecoveryWatch(server.url))
        self.clients = enter(Meddler(server.url, size.seed, pause=size.pace / 4))
        self._fleet = enter(Fleet(server.url))
        self.workers = ChaosWorkers(launch, size.workers)

    def play(self, agents: list[Agent]) -> None:
        """Submit runs and let events strike, then wait until all has settled and stop."""
        self.workers.await_one()
        schedule = self.size.schedule
        shares = list(_shares(self.size.runs, len(schedule)))
        for number, (event, share) in enumerate(zip(schedule, shares, strict=True)):
            self._submit(share, agents[number % len(agents)])
            time.sleep(self.size.pace * self._draw.uniform(0.5, 1.5))  # the pace of the events
            self._strike(event)
        self.settle()

    def settle(self) -> None:
        """End the trouble; return when every run has ended and all workers have stopped."""
        self.clients.end()
        wait_until(lambda: not self.workers.frozen, within=30, what="all workers thawed")
        try:
            wait_until(self._all_ended, within=120, what="the end of all runs")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._left()}") from None
        with redis.Redis.from_url(self._server.url, decode_responses=True) as client:
            await_upkeep(client)
        self.exit_codes = self.workers.stop()
        self._stack.close()

    def _submit(self, share: int, agent: Agent) -> None:
        start = len(self.keys)
        keys = [f"chaos {number}" for number in range(start, start + share)]
        if not keys:
            return
        lines = [{"id": key, "input": key} for key in keys]
        self._fleet.submit_batch(lines, agent=agent)
        self._orders.append((lines, agent))
        self.keys += keys
        with redis.Redis.from_url(self._server.url, decode_responses=True) as client:
            for shard in range(16):
                self.clients.learn(map(str, client.zrange(f"sf:{{s{shard:02d}}}:due", 0, -1)))

    def _strike(self, event: str) -> None:
        if event in ("kill", "stop"):
            wait_until(self.workers.steady, within=120, what="a worker worth hitting")
            name = self._draw.choice(self.workers.steady())
            if event == "kill":
                self.workers.kill(name, self.watch)
            else:
                self.workers.freeze(name, LEASE + self._draw.uniform(0.5, 2), self.watch)
        elif event == "roll":
            self.workers.roll()
        elif event == "wipe":
            self.courier.wipe()
        elif event == "loss":
            assert self._lose, "nothing is there that loses"
            self._lose()
            for lines, agent in self._orders:
                self._fleet.submit_batch(lines, agent=agent)
        else:
            (self._server.kill if event == "redis-kill" else self._server.stop)()
            time.sleep(self._draw.uniform(0, 1))  # an outage
            self._server.start()
        self.happened[event] += 1

    def _left(self) -> str:
        """Return what is stored of the runs that are still active."""
        lines = []
        with redis.Redis.from_url(self._server.url, decode_responses=True) as client:
            lines.append(
                f"now {client.time()}, queues {[client.llen(one) for one in BROKER_KEYS[:3]]}"
            )
            for shard in range(16):
                tag = f"sf:{{s{shard:02d}}}:"
                for run_id, score in client.zrange(f"{tag}due", 0, -1, withscores=True):
                    header = client.hgetall(f"{tag}run:{run_id}")
                    shown = {name: value for name, value in header.items() if len(value) < 80}
                    journal = client.hgetall(f"{tag}run:{run_id}:journal")
                    places = [client.hget(f"sf:{{limits}}:{one}", run_id) for one in PLACES]
                    lines.append(f"{run_id} due {score:.0f}\n  {shown}\n  {journal}\n  {places}")
            lines.append(f"limits {client.hgetall('sf:{limits}:state')}")
        return "\n".join(lines)

    def _all_ended(self) -> bool:
        """Tell whether nothing is active any more; take pauses back."""
        with redis.Redis.from_url(self._server.url, decode_responses=True) as client:
            for key in client.scan_iter(match="sf:{s*}:run:*", count=1000):
                run_id = key.split(":run:")[1]
                if ":" not in run_id and client.hget(key, "status") == "paused":
                    self._fleet.runs.resume(run_id)
                    return False
            return not any(client.zcard(f"sf:{{s{shard:02d}}}:due") for shard in range(16))


def _shares(total: int, parts: int) -> Iterator[int]:
    for number in range(parts):
        yield total * (number + 1) // parts - total * number // parts


def worker_env(name: str, agents: Path, effects: Path) -> dict[str, str]:
    """Return a worker's environment; the second one publishes its hints after the commit."""
    enqueue = {"STEPFLEET_ENQUEUE": "publish"} if name.startswith("w1-") else {}
    own = {"STEPFLEET_AGENTS": str(agents), "EFFECTS": str(effects)}
    return {**WORKER, **own, **enqueue}


def worker_options(name: str, *, processes: bool = True) -> tuple[str, ...]:
    """Return a worker's options; the first one has a pool of processes, if any has."""
    prefork = ("-P", "prefork", "-c", "4") if processes and name.startswith("w0-") else ()
    return ("-Q", f"{READ},{HEAVY}", *prefork)
