"""The in-process mode gives what the fleet gives."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from support.workers.fleet_workers import AGENTS as AGENTS_FILE
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import AgentRunResult, AsyncFleet, ErrorPolicy
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.worker.runtime.inline import InlineWorker
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Fault, Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

LONG = 60.0
KINDS = 4
AGENTS = load_agents(str(AGENTS_FILE))
CASES = {
    "plain": ["a question", "another"],
    "strict": ["one that breaks"],
    "patient": ["one that breaks", "one that goes well"],
}


def rules(request: RequestRecord) -> Reply:
    if "breaks" in request.question and request.turn <= 2:
        return Reply(tool_calls=(ToolCallReply("broken", {"what": "this"}),))
    if request.turn == 1:
        return Reply("Looking.", tool_calls=(ToolCallReply("look", {"what": "that"}),))
    return Reply(f"answer to {request.question}")


def essence(result: AgentRunResult) -> dict[str, Any]:
    """Return what does not depend on when and where the run was done."""
    whole = result.to_dict()
    for step in whole["steps"]:
        for name in ("started_at", "duration_ms", "worker", "request_id"):
            step.pop(name, None)
        for call in step["tool_calls"]:
            call.pop("timestamp")
            call.pop("duration_ms")
    keep = ("agent_name", "lifecycle", "stop_reason", "status", "output", "steps", "usage", "error")
    return {name: whole[name] for name in keep}


async def submitted(fleet: AsyncFleet) -> list[str]:
    return [
        await fleet.submit(AGENTS[name], question)
        for name, questions in CASES.items()
        for question in questions
    ]


async def test_inline_runs_equal_those_of_a_fleet(
    redis_url: str, model: ModelServer, start_worker: Callable[..., FleetWorker], monkeypatch: Any
) -> None:
    """DIST-16: same script, same results, transient failures included."""
    model.follow(rules)
    # Of four requests for that turn, the first one of each way.
    for attempt in (1, 3):
        model.fail(Fault("server_error"), key="a question", turn=2, attempt=attempt)
    monkeypatch.setenv("OPENAI_BASE_URL", model.url)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    settings = load_settings(redis_url=redis_url)
    async with AsyncFleet(redis_url) as fleet:
        inline = await submitted(fleet)
        async with InlineWorker(settings, AGENTS.values()) as worker:
            await worker.finish(*inline)
        ours = [essence(await fleet.runs.result(run_id)) for run_id in inline]
        model.log.clear()
        start_worker()
        on_fleet = await submitted(fleet)
        theirs = [essence(await fleet.runs.wait(run_id, timeout=LONG)) for run_id in on_fleet]
    assert model.count("a question", 2) == 4
    assert ours == theirs
    assert [one["stop_reason"] for one in ours] == [
        *("completed", "completed"),
        "error",
        *("completed", "completed"),
    ]


def any_rules(request: RequestRecord) -> Reply:
    """Answer by chance, and the same question in the same turn the same."""
    chance = random.Random(f"{request.question}/{request.turn}")
    look = ToolCallReply("look", {"what": f"{request.turn}"})
    broken = ToolCallReply("broken", {"what": "it"})
    return chance.choice(
        [
            Reply("Looking.", tool_calls=(look,)),
            Reply(tool_calls=(look, ToolCallReply("look", {"what": "more"}))),
            Reply(tool_calls=(broken,)),
            Reply(tool_calls=(look, broken)),
            Reply(tool_calls=(ToolCallReply("unheard_of", {}),)),
            Reply(tool_calls=(ToolCallReply("look", {"who": "wrong"}),)),
            Reply(f"answer {request.turn}"),
            Reply(""),
        ]
    )


async def all_kinds(fleet: AsyncFleet) -> list[str]:
    """Submit runs that end in each way; four are sent a further message later."""
    limits: tuple[dict[str, Any], ...] = (
        {},
        {"max_steps": 2},
        {"token_limit": 30},
        {"budget_usd": 1e-9},
        {"parallel_tool_execution": False},
        {"memory": {"max_messages": 3}},
        {"error_policy": ErrorPolicy.retry_all(2), "max_steps": 6},
    )
    return [
        await fleet.submit(AGENTS[name], f"question {n}", model_attempts=2, **given)
        for name in ("strict", "patient")
        for n, given in enumerate(limits)
    ]


@pytest.mark.long
async def test_runs_that_end_in_each_way_do_so_in_both_modes(
    redis_url: str, model: ModelServer, start_worker: Callable[..., FleetWorker], monkeypatch: Any
) -> None:
    """DIST-16: limits, budgets, failures, wrong calls, a window of memory; then further turns."""
    model.follow(any_rules)
    monkeypatch.setenv("OPENAI_BASE_URL", model.url)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    settings = load_settings(redis_url=redis_url)
    async with AsyncFleet(redis_url) as fleet:
        inline = await all_kinds(fleet)
        async with InlineWorker(settings, AGENTS.values()) as worker:
            await worker.finish(*inline)
            ours = [essence(await fleet.runs.result(run_id)) for run_id in inline]
            for run_id in inline[:4]:
                await fleet.runs.send(run_id, "and then?")
            await worker.finish(*inline[:4])
        ours += [essence(await fleet.runs.result(run_id)) for run_id in inline[:4]]
        start_worker()
        on_fleet = await all_kinds(fleet)
        theirs = [essence(await fleet.runs.wait(run_id, timeout=LONG)) for run_id in on_fleet]
        for run_id in on_fleet[:4]:
            await fleet.runs.send(run_id, "and then?")
        theirs += [essence(await fleet.runs.wait(run_id, timeout=LONG)) for run_id in on_fleet[:4]]
    assert ours == theirs
    assert len({one["stop_reason"] for one in ours}) >= KINDS
