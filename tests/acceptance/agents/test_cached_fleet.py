"""The response cache of a real fleet: two workers, a model server that counts, the command line."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.deadlines import wait_until
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import AgentRunResult, Fleet, RunStatus, UsageStats
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.models.pricing import cost_of
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Fault, FaultKind, Reply, ToolCallReply, Usage
from stepfleet.worker.testing.server import ModelServer

LONG = 180.0
FOLDER = Path(__file__).parents[1] / "agent_modules"
FILE = FOLDER / "cached_agents.py"
ENV = {"STEPFLEET_AGENTS": f"{FILE},{FOLDER / 'patient_cache.py'}"}
AGENTS = load_agents(str(FILE))
USED = Usage(prompt_tokens=100, completion_tokens=10)
TWO_CALLS = UsageStats(prompt_tokens=200, completion_tokens=20, total_tokens=220, llm_calls=2)
Ask = Callable[..., AgentRunResult]

pytestmark = pytest.mark.timeout(900)


def rules(request: RequestRecord) -> Reply:
    if not request.answers:
        return Reply(tool_calls=(ToolCallReply("look", {"what": request.question}),), usage=USED)
    return Reply(f"I have {request.answers[-1].content}.", usage=USED)


def asking(fleet: Fleet) -> Ask:
    def ask(agent: str, text: str, **overrides: Any) -> AgentRunResult:
        return fleet.run_with_steps(AGENTS[agent], text, timeout=LONG, **overrides)

    return ask


def calls_of(model: ModelServer) -> int:
    return len(model.requests)


def stepfleet(redis_url: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "stepfleet.orchestrator.cli", *arguments],
        env={**os.environ, "STEPFLEET_REDIS_URL": redis_url, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_workers_share_what_one_of_them_was_told(
    model: ModelServer, redis_url: str, start_worker: Callable[..., FleetWorker]
) -> None:
    """CACHE-01, CACHE-04, CACHE-05, CACHE-06, CACHE-08, CACHE-09, COST-13, CONF-01"""
    model.follow(rules)
    with Fleet(redis_url) as fleet:
        ask = asking(fleet)
        one = start_worker(name="one", env=ENV)
        filled = _fill(fleet, ask, model)
        start_worker(name="two", env=ENV)
        _share(fleet, model, redis_url, filled)
        one.end()
        assert [step.cached for step in ask("keen", "the sea").steps] == [True, True]
        _clear(fleet, ask, model, redis_url)


def _fill(fleet: Fleet, ask: Ask, model: ModelServer) -> AgentRunResult:
    for _ in range(2):
        assert ask("plain", "the sea").usage == TWO_CALLS
    assert calls_of(model) == 4
    first = ask("keen", "the sea")
    assert (first.usage, calls_of(model)) == (TWO_CALLS, 6)
    wait_until(lambda: fleet.cache.statistics().entries == 2, within=LONG, what="two entries")
    return first


def _share(fleet: Fleet, model: ModelServer, redis_url: str, first: AgentRunResult) -> None:
    again = [fleet.submit("keen", "the sea") for _ in range(10)]
    results = [fleet.runs.wait(run_id, timeout=LONG) for run_id in again]
    assert calls_of(model) == 6
    price = 2 * cost_of("gpt-4o-mini", UsageStats(prompt_tokens=100, completion_tokens=10))
    assert price > 0
    assert abs(first.cost_usd - price) < 1e-9
    for one in results:
        assert (one.status, one.output) == (RunStatus.COMPLETED, "I have seen the sea.")
        assert [step.cached for step in one.steps] == [True, True]
        assert (one.usage, one.cost_usd) == (UsageStats(cached_calls=2), 0)
        assert abs(one.saved_usd - price) < 1e-9
    shown = stepfleet(redis_url, "show", again[0])
    assert shown.count("cached (saved 110 tokens, $") == 2
    events = [one for one in fleet.runs.events(again[0]) if one["type"] == "agent.step.completed"]
    assert [one["payload"]["cached"] for one in events] == [True, True]
    told = orjson.loads(stepfleet(redis_url, "cache", "stats", "--json"))
    assert (told["entries"], told["hits"], told["misses"]) == (2, 20, 2)
    assert told["by_model"]["openai:gpt-4o-mini"]["bytes"] == told["bytes"] > 100


def _clear(fleet: Fleet, ask: Ask, model: ModelServer, redis_url: str) -> None:
    before = ask("keen", "the sea").steps[1].cache
    assert before
    assert fleet.cache.clear(key=before.key) == 1
    third = ask("keen", "the sea")
    assert [step.cached for step in third.steps] == [True, False]
    assert calls_of(model) == 7
    wait_until(lambda: fleet.cache.statistics().entries == 2, within=LONG, what="two entries")
    cleared = stepfleet(redis_url, "cache", "clear", "--model", "openai:gpt-4o-mini")
    assert cleared == "2 entries dropped\n"
    assert ask("keen", "the sea").usage == TWO_CALLS
    wait_until(lambda: fleet.cache.statistics().entries == 2, within=LONG, what="two entries")
    assert fleet.cache.clear() == 2


def test_only_whole_answers_are_kept_for_their_time_and_streamed_as_one_chunk(
    model: ModelServer, redis_url: str, start_worker: Callable[..., FleetWorker]
) -> None:
    """CACHE-02, CACHE-04, CACHE-07: a stream that breaks off, an answer cut short, an old one."""
    model.follow(rules)
    start_worker(env=ENV)
    with Fleet(redis_url) as fleet:
        check_that_whole_answers_are_kept(fleet, asking(fleet), model)
        check_that_a_kept_answer_is_one_chunk(fleet, asking(fleet), model)


def check_that_whole_answers_are_kept(fleet: Fleet, ask: Ask, model: ModelServer) -> None:
    streamed = {"settings": {"stream": True}}
    for kind in (FaultKind.TRUNCATED_STREAM, FaultKind.SERVER_ERROR):
        model.fail(Fault(kind), key=f"the {kind}", turn=1)
        assert ask("keen", f"the {kind}", **streamed).usage.llm_calls == 2
        assert model.count(f"the {kind}", 1) == 2
    wait_until(lambda: fleet.cache.statistics().entries == 4, within=LONG, what="whole answers")

    cut = Reply("I have se", usage=USED, finish_reason="length")
    model.script("a short answer", cut)
    for _ in range(2):
        assert ask("keen", "a short answer").usage.cached_calls == 0
    assert model.count("a short answer", 1) == 2
    assert fleet.cache.statistics().entries == 4

    ask("brief", "the wind")
    wait_until(lambda: fleet.cache.statistics().entries == 4, within=LONG, what="the entries' end")
    assert ask("brief", "the wind").usage == TWO_CALLS
    fleet.cache.clear()


def check_that_a_kept_answer_is_one_chunk(fleet: Fleet, ask: Ask, model: ModelServer) -> None:
    model.follow(lambda _: Reply("An old silent pond", piece=3, pause=0.02, usage=USED))
    assert ask("keen", "a poem").output == "An old silent pond"
    wait_until(lambda: ask("keen", "a poem").steps[0].cached, within=LONG, what="the entry")
    asked = calls_of(model)
    run_id = fleet.submit("keen", "a poem", broadcast="standard")
    told = [
        one for one in fleet.runs.events(run_id, chunks=True) if one["type"] == "agent.stream.chunk"
    ]
    assert fleet.runs.result(run_id).steps[0].cached
    assert [one["payload"]["chunk"] for one in told if one["payload"]["chunk"]] == [
        "An old silent pond"
    ]
    assert told[-1]["payload"]["is_complete"]
    assert calls_of(model) == asked
