"""Budgets of several tenants under kills and changes, recounted from the model server's log.

The large version takes its size from `CHAOS_RUNS`, `CHAOS_KILLS`, `CHAOS_REDIS_KILLS` and its
order from `CHAOS_SEED`.
"""

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from support.deadlines import wait_until
from support.servers.redis_servers import RedisServer, short_folder
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Batch, BudgetUse, Fleet
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply, Usage
from stepfleet.worker.testing.server import ModelServer

AGENTS = Path(__file__).parents[1] / "acceptance" / "agent_modules" / "agents.py"
PLAIN = load_agents(str(AGENTS))["plain"]
MODEL = "openai:scripted"
PRICES = {"openai": {"scripted": {"input": 100, "output": 100}}}
CALL = Decimal("0.002")
TOKENS = Usage(15, 5)
"""What each call takes: at these prices it costs as much."""
STEPS = 3
MANY = 100_000
TENANTS = ("stop", "hold", "free")
ENV = {
    "STEPFLEET_LEASE": "2",
    "STEPFLEET_GRACE": "0.5",
    "STEPFLEET_SLOTS": "12",
    "STEPFLEET_POISON_LIMIT": "50",
}

pytestmark = pytest.mark.timeout(420)


def rules(request: RequestRecord) -> Reply:
    """A tool in each turn but the last."""
    seconds = 0.15 + 0.2 * random.Random(f"{request.key} {request.turn}").random()
    if request.turn < STEPS:
        call = ToolCallReply("look", {"what": request.question})
        return Reply(tool_calls=(call,), latency=seconds, usage=TOKENS)
    return Reply("done", latency=seconds, usage=TOKENS)


@dataclass
class Chaos:
    """A fleet with budgets, and what happens to it. `budgets` are calls that a tenant may make.

    Workers that are killed are replaced where fewer than `least` are left.
    """

    server: RedisServer
    model: ModelServer
    fleet: Fleet
    launch: Callable[[], FleetWorker]
    draw: random.Random
    runs: int
    least: int = 1

    def play(self, events: list[str], pace: float) -> list[Batch]:
        """Submit runs of all tenants, and let events strike."""
        self.budgets = dict.fromkeys(TENANTS[:2], self.runs * STEPS // 2)
        self.set_limits()
        self.workers = [self.launch().launch() for _ in range(2)]
        batches = [self.submit(tenant) for tenant in TENANTS]
        wait_until(lambda: len(self.model.requests) > self.runs // 4, within=60, what="calls")
        for event in events:
            time.sleep(pace * self.draw.uniform(0.5, 1.5))  # the pace of the events
            self.strike(event)
        self.budgets["hold"] = MANY
        self.set_limits()
        return batches

    def submit(self, tenant: str) -> Batch:
        keys = [f"{tenant} {number}" for number in range(self.runs)]
        lines = [{"id": key, "input": key, "tenant": tenant} for key in keys]
        return self.fleet.submit_batch(lines, PLAIN, settings={"max_tokens": 5})

    def set_limits(self) -> None:
        rate = self.draw.choice((1500, 3000, 6000))
        limits = self.fleet.limits
        limits.set(MODEL, requests_per_minute=rate, in_flight=self.draw.choice((6, 12)))
        for tenant in TENANTS:
            calls = self.budgets.get(tenant, MANY)
            on_budget = "hold" if tenant == "hold" else "stop"
            usd = float(CALL * calls)
            limits.set(f"tenant:{tenant}", usd=usd, calls=MANY, on_budget=on_budget)

    def strike(self, event: str) -> None:
        if event == "kill":
            wait_until(self.is_busy, within=30, what="calls under way")
            victim = self.workers.pop(self.draw.randrange(len(self.workers)))
            victim.signal(signal.SIGKILL)
            victim.wait()
            if len(self.workers) < self.least:
                self.workers.append(self.launch().launch())
        elif event == "redis":
            self.server.kill()
            self.server.start()
        else:
            self.budgets["hold"] += self.runs // 4
            self.set_limits()

    def is_busy(self) -> bool:
        """Return whether a kill meets calls, or there are none left."""
        ended = sum(one.outcome is not None for one in self.model.requests)
        return self.model.log.in_flight >= 4 or ended > 2 * STEPS * self.runs

    def uses(self, tenant: str) -> dict[str, BudgetUse]:
        found = next(one for one in self.fleet.limits.use() if one.name == f"tenant:{tenant}")
        return {one.field: one for one in found.budgets}

    def is_settled(self, tenant: str) -> bool:
        return not any(one.reserved for one in self.uses(tenant).values())

    def recount(self) -> None:
        """Hold budgets, ledger and the server's log against each other."""
        served = Counter(one.question.split()[0] for one in self.model.requests)
        for tenant in TENANTS:
            wait_until(partial(self.is_settled, tenant), within=30, what="settlement")
            uses, total = self.uses(tenant), self.fleet.costs("tenant", tenant=tenant).total
            spent, lost = uses["calls"].spent, total.ambiguous_calls
            sys.stdout.write(
                f"{tenant}: served {served[tenant]}, ledger {total.calls} and {lost} ambiguous, "
                f"budget {spent} calls and {uses['usd'].spent} USD, over {uses['usd'].over}\n"
            )
            assert total.calls <= served[tenant] <= total.calls + lost, "the server's log"
            assert total.usd == CALL * total.calls
            assert total.calls <= spent <= total.calls + lost, "calls, once each"
            assert uses["usd"].spent >= total.usd
            most = self.model.log.most_in_flight + lost
            assert uses["usd"].over <= CALL * most, "no more than what estimates lacked"


@pytest.fixture
def chaos(
    own_redis: Callable[..., RedisServer], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Chaos]:
    """A fleet of so many runs for each tenant (the parameter)."""
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps(PRICES))
    server, births, started = own_redis(appendfsync="always"), count(), list[FleetWorker]()
    env = {**ENV, "STEPFLEET_AGENTS": str(AGENTS), "STEPFLEET_PRICING_CONFIG": str(prices)}
    with short_folder() as folder, ModelServer(rules) as model, Fleet(server.url) as fleet:

        def launch() -> FleetWorker:
            name = f"w{next(births)}"
            started.append(FleetWorker(folder, server.url, model.url, name=name, env=env))
            return started[-1]

        seed = int(os.environ.get("CHAOS_SEED", "1"))
        yield Chaos(server, model, fleet, launch, random.Random(seed), request.param)
        for worker in started:
            worker.end()


def check(chaos: Chaos, events: list[str], pace: float) -> None:
    chaos.draw.shuffle(events)
    stop, hold, free = chaos.play(events, pace)
    for batch in (hold, free):
        assert {one.output for one in batch.results()} == {"done"}
    reasons = Counter(str(one.stop_reason) for one in stop.results())
    assert reasons["guard"], "its budget ends runs"
    assert set(reasons) <= {"guard", "completed"}
    chaos.recount()


@pytest.mark.parametrize("chaos", [8], indirect=True)
def test_budgets_under_kills_are_what_the_ledger_and_the_server_have(chaos: Chaos) -> None:
    """MULTI-05, COST-12: small, in the gate."""
    check(chaos, ["kill", "raise", "redis"], 0.3)


RUNS, KILLS, REDIS_KILLS = (
    int(os.environ.get(f"CHAOS_{name}", most))
    for name, most in (("RUNS", "200"), ("KILLS", "8"), ("REDIS_KILLS", "3"))
)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chaos", [RUNS], indirect=True)
def test_budgets_under_kills_are_what_the_ledger_and_the_server_have_at_length(
    chaos: Chaos,
) -> None:
    """MULTI-05, COST-12: the same for long."""
    chaos.least = 2
    check(chaos, ["kill"] * KILLS + ["redis"] * REDIS_KILLS + ["raise"] * 3, 2.0)
