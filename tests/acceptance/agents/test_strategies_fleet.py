"""Strategies and plans on two workers, each step on whichever is free."""

import contextlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from support.deadlines import wait_until
from support.servers.redis_servers import RedisServer, short_folder
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import AgentCheckpoint, AgentRunResult, AgentState, Fleet, StopReason
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.records.steps import StepType
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

LONG = 60.0
SOURCE = Path(__file__).parents[1] / "agent_modules" / "strategic.py"
AGENTS = load_agents(str(SOURCE))
RUNS = 24
PLAN = "My plan:\n1. [ ] look\n2. [ ] answer"
Rules = Callable[[RequestRecord], Reply]


@pytest.fixture(scope="module")
def workers(servers: tuple[RedisServer, ModelServer]) -> Iterator[list[FleetWorker]]:
    redis, model = servers
    with contextlib.ExitStack() as cleanup:
        folder = cleanup.enter_context(short_folder())
        env = {"STEPFLEET_LEASE": "30", "STEPFLEET_SLOTS": "2", "STEPFLEET_AGENTS": str(SOURCE)}
        started = [
            FleetWorker(folder, redis.url, model.url, name=f"w{n}", env=env) for n in range(2)
        ]
        for one in started:
            cleanup.callback(one.end)
        with ThreadPoolExecutor() as threads:
            list(threads.map(FleetWorker.start, started))
        yield started


@pytest.fixture
def model(servers: tuple[RedisServer, ModelServer], workers: list[FleetWorker]) -> ModelServer:
    return servers[1]


@pytest.fixture
def fleet(servers: tuple[RedisServer, ModelServer]) -> Iterator[Fleet]:
    with Fleet(servers[0].url) as opened:
        yield opened


def said(**fields: Any) -> Reply:
    return Reply(json.dumps(fields), latency=0.02)


def looks_twice(request: RequestRecord) -> Reply:
    """Look for `a`, then for `b`, each with its thought; then answer."""
    if request.turn > 2:
        return said(thought="I know", action=None, answer="both seen", done=True)
    what = "ab"[request.turn - 1]
    action = {"tool": "look", "arguments": {"what": what}}
    return said(thought=f"look for {what}", action=action, done=False)


def run_all(fleet: Fleet, agent: str, **options: Any) -> list[tuple[AgentRunResult, AgentState]]:
    """Return result and state of several runs at once; some of them moved between workers.

    There are more of them where one worker was faster than all of the first ones.
    """
    ended: list[tuple[AgentRunResult, AgentState]] = []

    def some_have_moved() -> bool:
        numbers = range(len(ended), len(ended) + RUNS)
        ids = [fleet.submit(AGENTS[agent], f"{agent}-{n}-", **options) for n in numbers]
        ended.extend(
            (fleet.runs.wait(run_id, timeout=60), fleet.runs.show(run_id).state) for run_id in ids
        )
        return any(len({step.worker for step in result.steps}) > 1 for result, _ in ended)

    wait_until(some_have_moved, what="a run that moved")
    return ended


def requests_of(model: ModelServer, text: str) -> list[RequestRecord]:
    return [one for one in model.requests if text in one.question]


def test_react_in_json_mode_keeps_its_history_between_workers(
    fleet: Fleet, model: ModelServer, workers: list[FleetWorker]
) -> None:
    """STRAT-03, STRAT-05, STRAT-07, STRAT-12"""
    model.follow(looks_twice)
    ended = run_all(fleet, "react")
    for result, state in ended:
        assert (result.output, result.steps_used) == ("both seen", 3)
        assert state.strategy_state["react_history"] == [
            {
                "thought": f"look for {what}",
                "action": {"tool": "look", "arguments": {"what": what}},
                "observation": f"seen {what}",
            }
            for what in "ab"
        ] + [{"thought": "I know", "action": None, "observation": None}]
        wait_until_logged(workers, result.run_id, 3)
    asked = requests_of(model, "react-")
    assert len(asked) == 3 * len(ended)
    assert all(one.body["response_format"] == {"type": "json_object"} for one in asked)
    assert all(one.tools == () for one in asked)


def wait_until_logged(workers: list[FleetWorker], run_id: str, steps: int) -> None:
    def lines() -> int:
        return sum(worker.log.count(f"run {run_id} step ") for worker in workers)

    wait_until(lambda: lines() == steps, within=LONG)


def test_react_with_native_calls_keeps_its_history_between_workers(
    fleet: Fleet, model: ModelServer
) -> None:
    """STRAT-03, STRAT-12"""

    def rules(request: RequestRecord) -> Reply:
        if request.turn > 2:
            return Reply("both seen", latency=0.02)
        call = ToolCallReply("look", {"what": "ab"[request.turn - 1]})
        return Reply(f"thought {request.turn}", tool_calls=(call,), latency=0.02)

    model.follow(rules)
    for result, state in run_all(fleet, "native"):
        assert (result.output, result.steps_used) == ("both seen", 3)
        history = state.strategy_state["react_history"]
        assert [one["thought"] for one in history] == ["thought 1", "thought 2", "both seen"]
        assert [one["observation"] for one in history] == ["seen a", "seen b", None]


def test_chain_of_thought_goes_on_between_workers(fleet: Fleet, model: ModelServer) -> None:
    """STRAT-04, STRAT-09"""
    model.follow(
        lambda request: said(
            step=request.turn,
            reasoning=f"r{request.turn}",
            conclusion=f"c{request.turn}",
            final=request.turn == 4,
        )
    )
    for result, state in run_all(fleet, "chain"):
        assert (result.output, result.steps_used) == ("c4", 4)
        steps = state.strategy_state["cot_steps"]
        assert [(one["step"], one["reasoning"]) for one in steps] == [
            (n, f"r{n}") for n in (1, 2, 3, 4)
        ]
        assert result.outcome is not None
        assert result.outcome.get_evaluation_for("StrategyContinuation") is not None


def test_the_third_request_holds_the_two_earlier_thoughts(fleet: Fleet, model: ModelServer) -> None:
    """STRAT-08: in the prompt, which is worded anew for each call."""
    model.follow(looks_twice)
    run_all(fleet, "worded")
    asked = requests_of(model, "Question: worded-3-")
    questions = [one.question for one in sorted(asked, key=lambda one: one.turn)]
    assert questions[0] == "Question: worded-3-\nSo far:\n"
    assert "thought: look for a" in questions[1]
    for part in ("thought: look for a", "observation: seen a", "thought: look for b"):
        assert part in questions[2]


def test_a_strategy_of_ones_own_is_found_by_its_reference(fleet: Fleet, model: ModelServer) -> None:
    """STRAT-06, STRAT-13: with its options; what it prepares is sent."""
    model.follow(lambda request: Reply("sure" if request.turn == 3 else "hm", latency=0.02))
    for result, state in run_all(fleet, "careful"):
        assert (result.output, result.steps_used) == ("sure", 3)
        assert state.strategy_state["seen"] == ["1: hm", "2: hm", "3: sure"]
        told = [one.text for one in state.messages if one.is_user()]
        assert told[1:] == ["Are you sure?", "Are you sure?"]
    last = [one.messages[-1]["content"] for one in requests_of(model, "careful-0-")]
    assert last == [f"checks wanted: 2, made: {n}" for n in range(3)]


def test_a_run_taken_up_again_keeps_the_history_of_its_strategy(
    fleet: Fleet, model: ModelServer
) -> None:
    """STRAT-10, STATE-06: stopped in the middle, resumed with a raised limit."""

    def rules(request: RequestRecord) -> Reply:
        if request.turn > 3:
            return said(thought="enough", answer="noted", done=True)
        action = {"tool": "note", "arguments": {"what": f"n{request.turn}"}}
        return said(thought=f"t{request.turn}", action=action)

    model.follow(rules)
    run_id = fleet.submit(AGENTS["react"], "resumed-", max_steps=2)
    assert fleet.runs.wait(run_id, timeout=60).stop_reason is StopReason.STEPS_LIMIT
    assert len(fleet.runs.show(run_id).state.strategy_state["react_history"]) == 2
    fleet.runs.retry(run_id, max_steps=8)
    wait_until(lambda: fleet.runs.result(run_id).success, within=60)
    state = fleet.runs.show(run_id).state
    thoughts = [one["thought"] for one in state.strategy_state["react_history"]]
    assert thoughts == ["t1", "t2", "t3", "enough"]
    assert state.custom_state == {"notes": ["n1", "n2", "n3"]}
    assert (state.last_result, state.last_output, state.last_error) == ("3 notes", "noted", None)
    assert len(state.tool_results) == 3


def test_a_checkpoint_in_the_middle_holds_the_history(fleet: Fleet, model: ModelServer) -> None:
    """STRAT-10: and a run restored from it goes on with it."""
    model.follow(looks_twice)
    run_id = fleet.submit(AGENTS["react"], "kept-")
    fleet.runs.wait(run_id, timeout=60)
    stored = fleet.history.checkpoint(run_id, at=1).to_json()
    checkpoint = AgentCheckpoint.from_json(stored)
    assert [one["thought"] for one in checkpoint.state.strategy_state["react_history"]] == [
        "look for a"
    ]
    copy = fleet.history.restore(checkpoint, AGENTS["react"], run_id=str(uuid4()))
    result = fleet.runs.wait(copy, timeout=60)
    assert (result.output, result.steps_used) == ("both seen", 3)
    history = fleet.runs.show(copy).state.strategy_state["react_history"]
    assert history == fleet.runs.show(run_id).state.strategy_state["react_history"]


def test_plans_are_made_at_the_start_and_after_every_two_steps(
    fleet: Fleet, model: ModelServer
) -> None:
    """PLAN-05, PLAN-06, PLAN-07: they count as steps, and the plan moves with the run."""

    def rules(request: RequestRecord) -> Reply:
        last = str(request.messages[-1]["content"])
        if "what is your approach?" in last:
            return Reply(PLAN, latency=0.02)
        if "what is the next step?" in last:
            assert "1. [ ] look" in last
            return Reply("1. [x] look\n2. [~] answer", latency=0.02)
        if len(request.answers) == 2:
            return Reply("done", latency=0.02)
        return Reply("so", tool_calls=(ToolCallReply("look", {"what": "a"}),), latency=0.02)

    model.follow(rules)
    planning, tools, final = StepType.PLANNING, StepType.TOOL_EXECUTION, StepType.FINAL_RESPONSE
    for result, state in run_all(fleet, "planner"):
        assert [step.type for step in result.steps] == [planning, tools, tools, planning, final]
        assert result.output == "done"
        assert all(step.usage and step.usage.total_tokens for step in result.steps)
        states = [step["state"] for step in state.strategy_state["plan"]]
        assert states == ["completed", "in_progress"]
        assert f"Planning: {' '.join(PLAN.split())}" in result.replay()
