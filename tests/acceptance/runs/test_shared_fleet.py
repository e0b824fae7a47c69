"""One fleet of four workers that many runs share; started once for all tests of this file."""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.deadlines import wait_until
from support.servers.redis_servers import RedisServer, short_folder
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Fleet, RunStatus, StopReason, UsageStats
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.models.pricing import load_prices
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

LONG = 60.0
AGENTS = load_agents(str(Path(__file__).parents[1] / "agent_modules" / "agents.py"))
WORKERS = 4
DONE = re.compile(r"Task plain: step \d+\[.* succeeded in .*: '(?:continue|completed)'")
Rules = Callable[[RequestRecord], Reply]


@pytest.fixture(scope="module")
def workers(servers: tuple[RedisServer, ModelServer]) -> Iterator[list[FleetWorker]]:
    redis, model = servers
    with contextlib.ExitStack() as cleanup:
        folder = cleanup.enter_context(short_folder())
        env = {"STEPFLEET_LEASE": "30", "STEPFLEET_SLOTS": "20"}
        started = [
            FleetWorker(folder, redis.url, model.url, name=f"w{n}", env=env) for n in range(WORKERS)
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


def looks(turns: int, latency: float = 0.01) -> Rules:
    """Look the conversation's key up in each turn but the last, and tell it in every text."""

    def rules(request: RequestRecord) -> Reply:
        text = f"<{request.key}> in turn {request.turn}"
        if request.turn == turns:
            return Reply(text, latency=latency)
        call = ToolCallReply("look", {"what": f"<{request.key}>"})
        return Reply(text, tool_calls=(call,), latency=latency)

    return rules


def test_two_hundred_runs_on_four_workers_share_nothing(
    fleet: Fleet, model: ModelServer, workers: list[FleetWorker]
) -> None:
    """STATE-12, DIST-01, DIST-11, LLM-08, RUN-06, RUN-09: one task and one call per step."""
    model.follow(looks(3))
    calls = len(model.requests)
    tasks = done(workers)
    lines = [{"id": f"r{n}", "input": f"question-{n}-"} for n in range(200)]
    batch = fleet.submit_batch(lines, agent=AGENTS["plain"])
    results = list(batch.results(ordered=True))
    moved = 0
    for n, result in enumerate(results):
        assert result.status is RunStatus.COMPLETED
        assert [step.step for step in result.steps] == [1, 2, 3]
        assert result.usage.llm_calls == 3
        reported = [step.usage.total_tokens for step in result.steps if step.usage]
        assert sum(reported) == result.usage.total_tokens > 0
        own = [
            one.text for one in fleet.runs.show(result.run_id).state.messages if not one.is_system()
        ]
        assert len(own) == 6
        assert all(f"question-{n}-" in text for text in own)
        moved += len({step.worker for step in result.steps}) > 1
    assert moved > 0
    assert len(model.requests) - calls == 600 == batch.progress().steps
    wait_until(lambda: done(workers) - tasks >= 600, within=LONG)
    assert done(workers) - tasks == 600


def done(workers: list[FleetWorker]) -> int:
    """Count the tasks that did a step; a hint that came twice is `dropped`."""
    return sum(len(DONE.findall(worker.log)) for worker in workers)


def test_twenty_steps_on_several_workers_add_up(fleet: Fleet, model: ModelServer) -> None:
    """TIME-12, DIST-11: time, usage and tallies are the sums over the steps."""
    model.follow(looks(20))
    results = [
        fleet.runs.wait(run_id, timeout=LONG)
        for run_id in [
            fleet.submit(AGENTS["plain"], f"long-{n}-", max_steps=20, token_limit=None)
            for n in range(4)
        ]
    ]
    for result in results:
        assert [step.step for step in result.steps] == list(range(1, 21))
        seconds = sum(step.duration_ms for step in result.steps) / 1000
        assert result.cumulative_execution_seconds == pytest.approx(seconds)
        assert result.tool_calls_by_name == {"look": 19}
    assert len({step.worker for result in results for step in result.steps}) > 1


def test_slow_steps_on_several_workers_meet_the_wall_clock_limit(
    fleet: Fleet, model: ModelServer
) -> None:
    """TIME-05, CONT-17: no step alone is longer than the limit; a reset clock would not end it."""
    limit = 8.0
    model.follow(looks(100, latency=3.0))
    run_ids = [fleet.submit(AGENTS["plain"], f"slow-{n}-", time_limit=limit) for n in range(8)]
    results = [fleet.runs.wait(run_id, timeout=LONG) for run_id in run_ids]
    for result in results:
        assert result.stop_reason is StopReason.TIME_LIMIT
        seconds = [step.duration_ms / 1000 for step in result.steps]
        assert len(seconds) >= 2
        assert max(seconds) < limit
        assert sum(seconds[:-1]) < limit
    spread = Counter(len({step.worker for step in result.steps}) > 1 for result in results)
    assert spread[True] > 0


def test_a_cancel_by_another_process_resolves_the_outcome(fleet: Fleet, model: ModelServer) -> None:
    """CONT-22, RUN-17: in the second step; there is no third."""
    model.follow(lambda request: looks(9, 0.01 if request.turn == 1 else 600.0)(request))
    run_id = fleet.submit(AGENTS["plain"], "cancel-me-")
    wait_until(lambda: [one for one in model.requests if "cancel-me-" in one.key][1:], within=LONG)
    fleet.runs.cancel(run_id)
    result = fleet.runs.wait(run_id, timeout=LONG)
    assert result.status is RunStatus.CANCELLED
    assert result.outcome is not None
    assert result.outcome.resolved_by == "StopRequested"
    assert [step.step for step in result.steps] == [1]
    assert result.error is None


def test_three_ways_to_ask_are_the_same_run_on_the_fleet(fleet: Fleet, model: ModelServer) -> None:
    """RUN-31, LLM-16: text, result and text of a conversation, by the same steps."""
    model.follow(looks(2))
    calls = len(model.requests)
    text = fleet.run(AGENTS["plain"], "ask-1-", timeout=LONG)
    result = fleet.run_with_steps(AGENTS["plain"], "ask-2-", timeout=LONG)
    asked = [{"role": "user", "content": "ask-3-"}]
    last = fleet.run_with_messages(AGENTS["plain"], asked, timeout=LONG)
    assert [text, result.output, last] == [f"<ask-{n}-> in turn 2" for n in (1, 2, 3)]
    assert result.steps_used == 2
    assert len(model.requests) - calls == 6


def test_a_result_can_be_walked_through_and_written_down(fleet: Fleet, model: ModelServer) -> None:
    """QUAL-08, COST-09: with each tool's time; its cost is that of the calls that were answered."""
    model.follow(looks(3))
    agent = AGENTS["plain"]
    run_id = fleet.submit(agent, "walk-me-")
    result = fleet.runs.wait(run_id, timeout=LONG)

    assert result.output == "<walk-me-> in turn 3"
    assert result.status is not None
    assert result.status.value == "completed"
    assert result.run_id == run_id
    timings = {}
    for step in result.steps:
        for call in step.tool_calls:
            timings[step.step, call.tool_name] = call.duration_ms
    assert timings.keys() == {(1, "look"), (2, "look")}
    assert None not in timings.values()
    told = json.loads(json.dumps(result.to_dict()))
    assert (told["run_id"], told["output"], told["status"]) == (run_id, result.output, "completed")
    assert len(told["steps"]) == result.steps_used == 3

    price = load_prices().price_of(agent.config.model)
    answered = [one.usage for one in model.requests if "walk-me-" in one.key and one.usage]
    usages = [
        UsageStats(prompt_tokens=one.prompt_tokens, completion_tokens=one.completion_tokens)
        for one in answered
    ]
    assert len(usages) == 3
    assert result.cost_usd == pytest.approx(sum(map(price.cost, usages)))
    assert result.cost_usd > 0
    assert [call.cost for call in fleet.history.get_cost_calls(run_id)] == pytest.approx(
        list(map(price.cost, usages))
    )
