"""Calls that are over at once and only read: noted beforehand only where a worker was lost."""

from typing import Any

import pytest
from support.runs.opened_runs import lease_runs_out
from support.runs.scripted_steps import Crash, Hands, Script, call, say
from support.runs.stored_runs import bench

from stepfleet.orchestrator import Agent, tool


@tool(read_only=True, thread=False)
def look(what: str) -> str:
    """Look something up."""
    return f"seen {what}"


@tool(thread=False)
def put(what: str) -> str:
    """Put something down."""
    return f"put {what}"


def agent(*answers: Any) -> Agent:
    return Agent("scripted", model=Script(answers), tools=[look, put])


LOOKS = (call(("look", {"what": "here"}), ("look", {"what": "there"})), say("done"))
PUTS = (call(("look", {"what": "here"}), ("put", {"what": "tea"})), say("done"))


async def test_a_step_whose_tools_are_over_at_once_writes_no_journal(redis_url: str) -> None:
    async with bench(redis_url, agent(*LOOKS)) as desk:
        run_id = await desk.create()
        await Hands(desk, desk.agent, crash_at="before-journal").finish(run_id)
        stored = await desk.stored(run_id)
    results = [one.result for one in stored.result().steps[0].tool_calls]
    assert results == ["seen here", "seen there"]


async def test_one_tool_that_does_more_than_read_is_noted_before_it_starts(redis_url: str) -> None:
    """TOOL-26"""
    async with bench(redis_url, agent(*PUTS)) as desk:
        run_id = await desk.create()
        with pytest.raises(Crash):
            await Hands(desk, desk.agent, crash_at="before-journal").step(run_id, 0)


async def test_a_step_that_lost_a_worker_is_noted_from_then_on(redis_url: str) -> None:
    """DIST-08: only so the tool that ends its workers can be named."""
    async with bench(redis_url, agent(*LOOKS), lease=0.5, grace=60) as desk:
        run_id = await desk.create()
        with pytest.raises(Crash):
            await Hands(desk, desk.agent, crash_at="during-tool").step(run_id, 0)
        await lease_runs_out(desk, run_id)
        with pytest.raises(Crash):
            await Hands(desk, desk.agent, crash_at="after-journal").step(run_id, 0)
        await lease_runs_out(desk, run_id)
        await Hands(desk, desk.agent).finish(run_id)
        stored = await desk.stored(run_id)
    lost = stored.result().lost_attempts
    assert [one.ambiguous for one in lost] == [True, False]
    assert [step.step for step in stored.result().steps] == [1, 2]
