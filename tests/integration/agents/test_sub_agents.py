"""Agents that work for others, in the caller's process: cut, counted, limited, listed."""

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from support.runs.scripted_steps import Script, call, say

from stepfleet.orchestrator import (
    Agent,
    AsyncFleet,
    ConfigurationError,
    ErrorPolicy,
    LLMResponse,
    ModelRequest,
    StopReason,
)
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store.batches.batches import run_id_of
from stepfleet.worker.runtime.inline import InlineWorker

MODEL = "openai:gpt-4o-mini"
LENIENT = ErrorPolicy.ignore_tool_errors()


def child(*script: Any, **config: Any) -> Agent:
    return Agent("researcher", model=Script(script), time_limit=None, **config)


async def echo(request: ModelRequest) -> LLMResponse:
    return say(f"found {request.messages[-1].text}")


def parent(*agents: Agent, calls: Sequence[str] = ("herring",), **config: Any) -> Agent:
    script = Script([call(*(("researcher", {"input": one}) for one in calls)), say("joined")])
    given = {"parallel_tool_execution": True, "error_policy": LENIENT, "time_limit": None, **config}
    return Agent("editor", model=script, agents=agents, **given)


async def finish(redis_url: str, agent: Agent, *ids: str) -> None:
    async with InlineWorker(load_settings(redis_url=redis_url), [agent]) as worker:
        await worker.finish(*ids)


async def test_sub_agents_work_in_the_callers_process(fleet: AsyncFleet, redis_url: str) -> None:
    agent = parent(child(echo), calls=("a", "b"))
    run_id = await fleet.submit(agent, "write")
    await finish(redis_url, agent, run_id)
    result = await fleet.runs.result(run_id)
    assert (result.output, result.success) == ("joined", True)
    assert {one.result for one in result.steps[0].tool_calls} == {"found a", "found b"}


async def test_a_result_is_cut_where_its_caller_says(fleet: AsyncFleet, redis_url: str) -> None:
    """MULTI-06"""
    agent = parent(child(say("é" * 250)), sub_agent_limits={"output": 100})
    run_id = await fleet.submit(agent, "write")
    await finish(redis_url, agent, run_id)
    (made,) = (await fleet.runs.result(run_id)).steps[0].tool_calls
    assert made.run is not None
    assert made.result == f"{'é' * 100}\n[150 more characters: see run {made.run.run_id}]"
    assert (await fleet.runs.result(made.run.run_id)).output == "é" * 250


async def test_structured_data_arrives_as_json(fleet: AsyncFleet, redis_url: str) -> None:
    schema = {"title": "Fact", "type": "object", "properties": {"size": {"type": "integer"}}}
    given = call(("structured_response", {"structured": {"size": 7}}))
    agent = parent(child(given, output_type=schema))
    run_id = await fleet.submit(agent, "write")
    await finish(redis_url, agent, run_id)
    (made,) = (await fleet.runs.result(run_id)).steps[0].tool_calls
    assert made.error is None
    assert orjson.loads(str(made.result)) == {"size": 7}


async def test_a_depth_of_none_refuses_every_run(fleet: AsyncFleet, redis_url: str) -> None:
    """MULTI-06: a limit of one's own, named in the error; no run is made."""
    agent = parent(child(say("never")), sub_agent_limits={"depth": 0})
    run_id = await fleet.submit(agent, "write")
    await finish(redis_url, agent, run_id)
    (made,) = (await fleet.runs.result(run_id)).steps[0].tool_calls
    assert made.error is not None
    assert "0 levels deep (sub_agent_limits.depth)" in made.error.message
    assert made.run is None
    assert not (await fleet.runs.page(parent=run_id)).runs


@pytest.mark.parametrize(
    ("arguments", "says"),
    [({}, "'input' is a required property"), ({"input": 5}, "input"), ({"inputs": "x"}, "input")],
)
async def test_arguments_that_do_not_fit_are_an_error_of_the_call(
    fleet: AsyncFleet, redis_url: str, arguments: dict[str, Any], says: str
) -> None:
    """MULTI-04, TOOL-06: no run is made, and the caller goes on with the error."""
    script = Script([call(("researcher", arguments)), say("so be it")])
    agent = Agent(
        "editor", model=script, agents=[child(say("never"))], error_policy=LENIENT, time_limit=None
    )
    run_id = await fleet.submit(agent, "write")
    async with asyncio.timeout(30):
        await finish(redis_url, agent, run_id)
    result = await fleet.runs.result(run_id)
    (made,) = result.steps[0].tool_calls
    assert made.error is not None
    assert says in made.error.message
    assert result.output == "so be it"
    assert not (await fleet.runs.page(parent=run_id)).runs


async def test_lists_have_the_runs_of_one_parent_or_those_of_none(
    fleet: AsyncFleet, redis_url: str
) -> None:
    """MULTI-02"""
    agent = parent(child(echo), calls=("a", "b"))
    run_id = await fleet.submit(agent, "write")
    other = await fleet.submit(child(say("alone")), "alone")
    await finish(redis_url, agent, run_id, other)
    below = (await fleet.runs.page(parent=run_id)).runs
    calls = (await fleet.runs.result(run_id)).steps[0].tool_calls
    assert {one.run_id for one in below} == {one.run.run_id for one in calls if one.run}
    assert {one.parent for one in below} == {run_id}
    assert {one.run_id for one in (await fleet.runs.page(parent="")).runs} == {run_id, other}
    assert len((await fleet.runs.page()).runs) == 4
    with pytest.raises(ConfigurationError, match="parent: write at most"):
        await fleet.runs.page(parent="x" * 1000)


async def test_a_batch_pays_for_the_runs_below_it(fleet: AsyncFleet, redis_url: str) -> None:
    """COST-14: its counters have its own runs alone; the ledger has all that it cost."""
    prices: dict[str, Any] = {"pricing": {"input": 1.0, "output": 1.0}}
    agent = parent(child(say("one"), **prices), **prices)
    batch = await fleet.submit_batch([{"input": "write"}], agent)
    await finish(redis_url, agent, run_id_of(batch.id, 0))
    result = await fleet.runs.result(run_id_of(batch.id, 0))
    assert result.below_cost_usd > 0
    counted = (await fleet.costs("agent", batch=batch.id)).rows
    assert {row.group["agent"]: row.calls for row in counted} == {"editor": 2, "researcher": 1}
    total = (await fleet.costs(batch=batch.id)).total.usd
    assert float(total or 0) == pytest.approx(result.total_cost_usd)
    progress = await batch.progress()
    assert (progress.total, progress.done) == (1, 1)
    assert not (await fleet.costs(batch="")).total.calls


async def test_a_budget_of_a_batch_ends_the_runs_below_it(
    fleet: AsyncFleet, redis_url: str
) -> None:
    """MULTI-05: nothing escapes the batch's limit by a call of another agent."""
    agent = parent(child(echo), calls=("a", "b"))
    batch = await fleet.submit_batch([{"input": "write"}], agent, limit={"calls": 2})
    await finish(redis_url, agent, run_id_of(batch.id, 0))
    result = await fleet.runs.result(run_id_of(batch.id, 0))
    ends = sorted(one.run.stop_reason for one in result.steps[0].tool_calls if one.run)
    assert ends == ["completed", "guard"]
    assert (await fleet.costs(batch=batch.id)).total.calls == 2
    assert result.stop_reason is StopReason.GUARD


async def test_a_token_limit_counts_the_runs_below_and_says_so(
    fleet: AsyncFleet, redis_url: str
) -> None:
    """COST-14: also the budget of a run, which ends it before its next call."""
    agent = parent(child(say("one")), calls=("a",), token_limit=30)
    run_id = await fleet.submit(agent, "write")
    await finish(redis_url, agent, run_id)
    result = await fleet.runs.result(run_id)
    own, below = result.usage.total_tokens, result.below_usage.total_tokens
    assert (own, below) == (15, 15)
    assert result.outcome is not None
    assert "30 (15 of them of runs below it) has reached the limit of 30" in result.outcome.reason


async def test_two_agents_of_one_name_are_refused(redis_url: str) -> None:
    inner = Agent("editor", model=MODEL)
    with pytest.raises(ConfigurationError, match="two agents are named 'editor'"):
        await finish(redis_url, Agent("editor", model=MODEL, agents=[inner]))


async def test_what_is_no_agent_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="field 'agents' holds a str"):
        Agent("editor", model=MODEL, agents=["researcher"])  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match=r"sub_agent_limits\.depth"):
        Agent("editor", model=MODEL, sub_agent_limits={"depth": -1})
