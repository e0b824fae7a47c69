"""Runs that begin after others, on real workers of which one is killed in between."""

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from support.deadlines import wait_until
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Fleet
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply
from stepfleet.worker.testing.server import ModelServer

LONG = 60.0
AGENT = load_agents(str(Path(__file__).parents[1] / "agent_modules" / "agents.py"))["plain"]
Start = Callable[..., FleetWorker]


def test_a_diamond_of_runs_joins_once_though_its_worker_is_killed(
    fleet: Fleet, start_worker: Start, model: ModelServer
) -> None:
    """MULTI-01, MULTI-04, MULTI-08: each waits without a slot, and gets what came before it."""
    killed = threading.Event()

    def rules(request: RequestRecord) -> Reply:
        if request.question.startswith("right"):
            killed.wait(LONG)
        return Reply(f"<{request.question}>")

    model.follow(rules)
    first = start_worker(name="w1", options=("-c", "1"), env={"STEPFLEET_LEASE": "2"})
    top = fleet.submit(AGENT, "top")
    left = fleet.submit(AGENT, "left {output}", after=top)
    right = fleet.submit(AGENT, "right {output}", after=top)
    last = fleet.submit(AGENT, "{l} + {r}", after={"l": left, "r": right})
    assert fleet.runs.wait(left, LONG).output == "<left <top>>"
    wait_until(lambda: "right <top>" in asked(model), within=LONG)
    assert fleet.runs.waits_for(last) == {right: "in_progress"}
    first.end()
    killed.set()
    start_worker(name="w2", env={"STEPFLEET_LEASE": "2"})
    assert fleet.runs.wait(last, LONG).output == "<<left <top>> + <right <top>>>"
    assert fleet.runs.waits_for(last) == {}
    found = asked(model)
    assert set(found) == {"top", "left <top>", "right <top>", "<left <top>> + <right <top>>"}
    assert sum(found.values()) - found["right <top>"] == 3


def asked(model: ModelServer) -> Counter[str]:
    return Counter(request.question for request in model.requests)
