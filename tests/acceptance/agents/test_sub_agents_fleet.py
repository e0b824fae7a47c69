"""Agents that work for others, on real workers: no slot while waiting, nothing done twice."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.deadlines import wait_until
from support.workers.command_line import CommandLine
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import ErrorPolicy, Fleet
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Fault, Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

Start = Callable[..., FleetWorker]
FILE = Path(__file__).parents[1] / "agent_modules" / "team_agents.py"
EDITOR, DEEP = (load_agents(str(FILE))[name] for name in ("editor", "level_1"))
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


def list_below(commands: CommandLine, redis_url: str, run_id: str) -> list[str]:
    """Return the runs that `stepfleet ls --parent` lists, by two pages."""
    found, more = list[str](), list[str]()
    for last in (False, True):
        listed = commands(
            *("ls", "--parent", run_id, "--limit", "2", "--json", *more),
            STEPFLEET_REDIS_URL=redis_url,
        )
        page = json.loads(listed.stdout)
        found += [one["run_id"] for one in page["runs"]]
        assert (page["next"] is None) is last
        more = ["--cursor", page["next"]]
    return found


def deeper(request: RequestRecord) -> Reply:
    """Have the next level do it."""
    if request.turn > 1 or request.key == "level 5":
        return Reply(f"done at {request.key}", latency=0.01)
    level = int(request.key.split()[1]) + 1
    call = ToolCallReply(f"level_{level}", {"input": f"level {level}"})
    return Reply("", tool_calls=(call,), latency=0.01)


def test_a_parent_and_three_children_share_one_slot(
    model: ModelServer,
    start_worker: Start,
    env: dict[str, str],
    redis_url: str,
    commands: CommandLine,
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
            assert (one.cost_usd, one.below_cost_usd) == (child.cost_usd, child.below_cost_usd)
        ended = [run for run in fleet.runs.page(status="completed").runs if run.run_id != run_id]
        assert len(ended) == 5
        below = [fleet.runs.result(run.run_id) for run in ended]
        assert result.below_cost_usd == pytest.approx(sum(one.cost_usd for one in below))
        tokens = sum(one.usage.total_tokens for one in below)
        assert result.total_usage.total_tokens == result.usage.total_tokens + tokens
        tree = fleet.runs.tree(run_id)
        assert [one.run.run_id for one in tree.below] == [one.run_id for one in children if one]
        assert [[leaf.run.agent for leaf in one.below] for one in tree.below] == [
            ["checker"],
            ["checker"],
            [],
        ]
        small = fleet.runs.tree(run_id, limit=2)
        assert (len(small.below), small.left_out) == (2, 1)
        assert [one.left_out for one in small.below] == [1, 1]
        listed = [run.run_id for run in fleet.runs.page(parent=run_id).runs]
        assert set(listed) == {one.run.run_id for one in tree.below}
        assert list_below(commands, redis_url, run_id) == listed
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
        active = fleet.runs.tree(run_id).below
        assert [len(one.below) for one in active if one.run.agent == "researcher"] == [1, 1]
        fleet.runs.cancel(run_id)
        wait_until(
            lambda: len(fleet.runs.page(status="cancelled").runs) == 5,
            within=LONG,
            what="the end of all of them",
        )
        assert not fleet.runs.page(status="in_progress").runs


def test_a_fourth_level_is_refused_and_all_costs_add_up(
    model: ModelServer, start_worker: Start, env: dict[str, str], redis_url: str
) -> None:
    """MULTI-06, COST-14: three levels below a submitted run; parent total = own + children."""
    model.follow(deeper)
    start_worker(env=env)
    with Fleet(redis_url) as fleet:
        run_id = fleet.submit(DEEP, "level 1")
        result = fleet.runs.wait(run_id, timeout=LONG)
        runs = [result]
        while (below := runs[-1].steps[0].tool_calls[0].run) is not None:
            runs.append(fleet.runs.result(below.run_id))
        assert len(runs) == 4
        refused = runs[-1].steps[0].tool_calls[0].error
        assert refused is not None
        assert "3 levels deep" in refused.message
        own = sum(one.cost_usd for one in runs)
        assert result.total_cost_usd == pytest.approx(own)
        assert own > result.cost_usd > 0


def test_a_retry_uses_runs_that_completed_and_retries_the_others(
    model: ModelServer, start_worker: Start, env: dict[str, str], redis_url: str
) -> None:
    """RETRY-01, MULTI-07: also over a pause, which reaches the runs below."""
    failing = [True]

    def rules(request: RequestRecord) -> Reply | Fault:
        if request.key == "look topic a 1" and failing[0]:
            return Fault("forbidden")
        latency = 0.5 if request.key == "look topic a 0" else 0.01
        return replace(team(request), latency=latency)

    model.follow(rules)
    start_worker(env={**env, "STEPFLEET_SLOTS": "8"})
    strict = EDITOR.with_error_policy(ErrorPolicy.stop_on_any_error())
    with Fleet(redis_url) as fleet:
        run_id = fleet.submit(strict, "topic a")
        wait_until(
            lambda: "look topic a 0" in {request.key for request in model.requests},
            within=LONG,
            what="a child at work",
        )
        fleet.runs.pause(run_id)
        wait_until(
            lambda: not fleet.runs.page(status="in_progress").runs,
            within=LONG,
            what="the pause of all that had not ended",
        )
        assert fleet.runs.page(status="paused").runs
        fleet.runs.resume(run_id)
        failed = fleet.runs.wait(run_id, timeout=LONG)
        assert not failed.success
        first = [one.run and one.run.status for one in failed.steps[0].tool_calls]
        assert first == ["completed", "error", "completed"]
        asked = Counter(request.key for request in model.requests)
        failing[0] = False
        fleet.runs.retry(run_id)
        result = fleet.runs.wait(run_id, timeout=LONG)
        assert result.success
        ids = [one.run and one.run.run_id for one in result.steps[0].tool_calls]
        assert ids == [one.run and one.run.run_id for one in failed.steps[0].tool_calls]
    again = Counter(request.key for request in model.requests) - asked
    assert again.keys() <= {"look topic a 1", "check look topic a 1", "topic a"}
    assert again["check look topic a 1"] == 1


def test_a_caller_whose_time_is_over_cancels_what_it_waits_for(
    model: ModelServer, start_worker: Start, env: dict[str, str], redis_url: str
) -> None:
    """CONT-17, MULTI-07, COST-14: nothing goes on without a caller, and its cost counts."""

    def slow(request: RequestRecord) -> Reply:
        return Reply("late", latency=30.0) if request.key.startswith("check") else team(request)

    model.follow(slow)
    start_worker(env={**env, "STEPFLEET_SLOTS": "8"})
    with Fleet(redis_url) as fleet:
        run_id = fleet.submit(EDITOR, "topic a", time_limit=4)
        result = fleet.runs.wait(run_id, timeout=LONG)
        assert result.stop_reason == "time_limit"
        codes = [one.error and one.error.code for one in result.steps[0].tool_calls]
        assert codes[:2] == ["TIMEOUT_ERROR", "TIMEOUT_ERROR"]
        ends = [one.run for one in result.steps[0].tool_calls if one.run]
        assert [one.agent for one in ends] == ["researcher", "researcher", "critic"]
        assert [one.status for one in ends] == ["cancelled", "cancelled", "completed"]
        children = fleet.runs.tree(run_id).below
        assert [one.run.run_id for one in children] == [one.run_id for one in ends]
        below = [fleet.runs.result(one.run_id).cost_usd for one in ends]
        assert result.below_cost_usd == pytest.approx(sum(below))
        assert result.below_cost_usd > 0
        wait_until(
            lambda: len(fleet.runs.page(status="cancelled").runs) == 4,
            within=LONG,
            what="the end of those below",
        )
