"""Budgets that a whole fleet shares, on real workers: the ledger's sums are the model server's."""

import json
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from support.deadlines import wait_until
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Batch, Fleet
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.store.limits import BudgetUse
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply, Usage, name_of
from stepfleet.worker.testing.server import ModelServer

Start = Callable[..., FleetWorker]
AGENT = load_agents(str(Path(__file__).parents[1] / "agent_modules" / "agents.py"))["plain"]
PRICES = {"openai": {"scripted": {"input": 100, "output": 100}}}
CALL = Decimal("0.002")
NOTHING = BudgetUse(field="usd", **dict.fromkeys(("budget", "spent", "reserved", "left"), CALL * 2))
TOKENS = Usage(15, 5)
"""What each call takes: at these prices it costs as much."""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Settings of workers with those prices."""
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps(PRICES))
    short = {"STEPFLEET_LEASE": "2", "STEPFLEET_GRACE": "0.5"}
    return {"STEPFLEET_PRICING_CONFIG": str(prices), "STEPFLEET_LIMITS": "{}", **short}


FAST = 6
"""Calls that are answered soon, before a worker is killed."""


def rules(request: RequestRecord) -> Reply:
    """One tool, then the answer."""
    if request.turn == 1:
        call = ToolCallReply("look", {"what": request.question})
        return Reply(tool_calls=(call,), latency=0.1, usage=TOKENS)
    return Reply("done", latency=0.1, usage=TOKENS)


def use_of(fleet: Fleet) -> BudgetUse:
    """Return the use of the tenant's budget."""
    uses = [one.budgets for one in fleet.limits.use() if one.name == "tenant:acme"]
    return uses[0][0] if uses else NOTHING


def calls_of_victim(server: ModelServer) -> list[RequestRecord]:
    """Return its calls that take long and have no answer yet."""
    ours = (one for one in server.requests if one.account == name_of("Bearer victim")[:12])
    return [one for one in ours if one.number > FAST and one.answered is None]


def is_spent(use: BudgetUse) -> bool:
    return use.left < CALL and not use.reserved


def lines(count: int) -> list[dict[str, str]]:
    return [{"id": f"{n}", "input": f"{n}", "tenant": "acme"} for n in range(count)]


def submit(fleet: Fleet, count: int) -> Batch:
    return fleet.submit_batch(lines(count), AGENT, settings={"max_tokens": 5})


def test_a_budget_holds_over_two_workers_and_a_kill(
    start_worker: Start, redis_url: str, env: dict[str, str]
) -> None:
    """MULTI-05: the runs make 48 calls, their budget is for 24, and a worker dies in its calls."""
    killed, budget = threading.Event(), CALL * 24
    env["STEPFLEET_SLOTS"] = "12"  # neither can take all runs

    def some_slow(request: RequestRecord) -> Reply:
        is_fast = killed.is_set() or request.number <= FAST
        return rules(request) if is_fast else replace(rules(request), latency=2.0)

    with ModelServer(some_slow) as server, Fleet(redis_url) as fleet:
        fleet.limits.set("tenant:acme", usd=float(budget))
        env["OPENAI_BASE_URL"] = server.url
        victim = start_worker(name="victim", env=env | {"OPENAI_API_KEY": "victim"})
        start_worker(name="heir", env=env)
        batch = submit(fleet, 24)
        wait_until(lambda: len(calls_of_victim(server)) >= 3, within=30, what="calls that last")
        victim.signal(signal.SIGKILL)
        killed.set()
        results = list(batch.results())
        served = CALL * len(server.requests)
        total = fleet.costs("tenant", tenant="acme").total
        wait_until(lambda: use_of(fleet).reserved == 0, within=30, what="settlement")
        use = use_of(fleet)
    assert len(results) == 24
    stopped = [one for one in results if one.stop_reason == "guard"]
    assert stopped, "the budget ends runs"
    assert all(one.outcome and "usd of tenant:acme" in one.outcome.reason for one in stopped)
    assert all((one.output == "done") == (one not in stopped) for one in results)
    assert total.ambiguous_calls >= 3, "those of the victim"
    assert total.usd <= served <= total.usd + CALL * total.ambiguous_calls, "the server's log"
    assert total.usd < use.spent, "the estimates of lost calls stay spent"
    assert served > budget * 3 // 4, "it is used"
    assert use.over <= CALL * server.log.most_in_flight, "no more than what estimates lacked"


def test_held_runs_go_on_when_the_budget_is_raised(
    start_worker: Start, redis_url: str, env: dict[str, str]
) -> None:
    """Nobody polls for them, others pass, and each call is made once."""
    limits = {"tenant:*": {"usd": 0.02, "on_budget": "hold"}}
    with ModelServer(rules) as server, Fleet(redis_url) as fleet:
        start_worker(
            env=env | {"OPENAI_BASE_URL": server.url, "STEPFLEET_LIMITS": json.dumps(limits)}
        )
        batch = submit(fleet, 20)
        wait_until(lambda: is_spent(use_of(fleet)), within=30, what="its end")
        assert fleet.run("plain", "other", tenant="other") == "done"
        [line] = wait_until(lambda: fleet.overview().limited, within=30, what="a line")
        assert str(line).endswith("raise it: stepfleet limits set tenant:acme usd=...")
        use = use_of(fleet)
        assert CALL * 9 < use.spent <= CALL * (10 + server.log.most_in_flight)
        assert use.spent == fleet.costs("tenant", tenant="acme").total.usd
        fleet.limits.set("tenant:acme", usd=1)
        results = list(batch.results())
        assert len(server.requests) == 42
    assert [one.output for one in results] == ["done"] * 20
    waits = {step.waited_for for one in results for step in one.steps if step.waited_seconds}
    assert "usd of tenant:acme" in waits


def test_a_batch_and_a_run_have_budgets_of_their_own(
    start_worker: Start, redis_url: str, env: dict[str, str]
) -> None:
    """They hold from the first call, in a fleet that had no limits, and go when they are over."""
    with ModelServer(rules) as server, Fleet(redis_url) as fleet:
        start_worker(env=env | {"OPENAI_BASE_URL": server.url})
        batch = fleet.submit_batch(lines(10), AGENT, limit={"calls": 6})
        run = fleet.run_with_steps(AGENT, "one", limit={"calls": 1}, tenant="b")
        results = list(batch.results())
        assert len(server.requests) == 7
        assert (run.stop_reason, len(run.steps)) == ("guard", 1)
        assert {f"batch:{batch.id}", f"run:{run.run_id}"} == set(fleet.limits.all())
    assert sum(len(one.steps) for one in results) == 6
    assert "guard" in [one.stop_reason for one in results]
