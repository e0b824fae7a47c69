"""Agents that work for others, on real workers: no slot while waiting, nothing done twice."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from support.deadlines import wait_until
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Fleet
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing import ModelServer, Reply, RequestRecord, ToolCallReply

Start = Callable[..., FleetWorker]
FILE = Path(__file__).parents[1] / "agent_modules" / "team_agents.py"
EDITOR = load_agents(str(FILE))["editor"]
LONG = 60.0


@pytest.fixture
def env() -> dict[str, str]:
    return {"STEPFLEET_AGENTS": str(FILE), "STEPFLEET_SLOTS": "1"}


def team(request: RequestRecord) -> Reply:
    """Answer as the agent would whose conversation this is."""
    key = request.key
    if request.turn > 1:
        results = [str(m["content"]) for m in request.body["messages"] if m["role"] == "tool"]
        return Reply(f"{key}: {'; '.join(results)}", latency=0.01)
    if key.startswith("topic"):
        calls = [ToolCallReply("researcher", {"input": f"look {key} {n}"}) for n in range(2)]
        calls.append(ToolCallReply("critic", {"text": key, "reader": "us"}))
        return Reply("I ask my team", tool_calls=tuple(calls), latency=0.01)
    if key.startswith("look"):
        call = ToolCallReply("checker", {"input": f"check {key}"})
        return Reply("", tool_calls=(call,), latency=0.01)
    return Reply(f"fine: {key}", latency=0.01)


def test_a_parent_and_three_children_share_one_slot(
    model: ModelServer, start_worker: Start, env: dict[str, str], redis_url: str
) -> None:
    """MULTI-04, MULTI-08: the children run at once, and are joined once."""
    model.follow(team)
    start_worker(env=env)
    with Fleet(redis_url) as fleet:
        run_id = fleet.submit(EDITOR, "topic a")
        result = fleet.runs.wait(run_id, timeout=LONG)
        assert result.success
        calls = result.steps[0].tool_calls
        assert [one.result for one in calls] == [
            "look topic a 0: fine: check look topic a 0",
            "look topic a 1: fine: check look topic a 1",
            "fine: Criticize topic a for us",
        ]
        children = [one.run for one in calls]
        assert [one.agent for one in children if one] == ["researcher", "researcher", "critic"]
        for one in children:
            assert one is not None
            child = fleet.runs.result(one.run_id)
            assert child.parent_agent_id == run_id
            assert one.cost_usd == child.cost_usd
    asked = Counter(request.key for request in model.requests)
    assert sum(asked.values()) == 2 + 2 * 2 + 2 + 1
    assert len(result.steps) == 2


def test_a_cancel_reaches_the_children_of_children(
    model: ModelServer, start_worker: Start, env: dict[str, str], redis_url: str
) -> None:
    """MULTI-07: from the run that was cancelled to those that its runs have started."""

    def slow(request: RequestRecord) -> Reply:
        return Reply("late", latency=30.0) if request.key.startswith("check") else team(request)

    model.follow(slow)
    start_worker(env={**env, "STEPFLEET_SLOTS": "8"})
    with Fleet(redis_url) as fleet:
        run_id = fleet.submit(EDITOR, "topic a")
        wanted = {"check look topic a 0", "check look topic a 1"}
        wait_until(
            lambda: wanted <= {request.key for request in model.requests},
            within=LONG,
            what="the grandchildren's calls",
        )
        fleet.runs.cancel(run_id)
        wait_until(
            lambda: len(fleet.runs.page(status="cancelled").runs) == 5,
            within=LONG,
            what="the end of all of them",
        )
        assert not fleet.runs.page(status="in_progress").runs
