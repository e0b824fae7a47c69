"""Tools write a run's custom state, and later ones read it, over a real Redis."""

from typing import Any

import pytest
from support.runs.opened_runs import lease_runs_out
from support.runs.scripted_steps import Crash, Hands, Script, call, say
from support.runs.stored_runs import bench

from stepfleet.orchestrator import Agent, StateUpdate, current_invocation, tool
from stepfleet.orchestrator.protocol.revision import further_turn, revise


@tool(thread=False)
def put(what: str) -> StateUpdate:
    """Put something into the basket."""
    basket = current_invocation().custom_state.get("basket", [])
    basket.append(what)
    return StateUpdate(f"{len(basket)} in the basket", custom_state={"basket": basket})


@tool
def odd() -> StateUpdate:
    """Keep what cannot be kept."""
    return StateUpdate("kept", custom_state={"path": b"bytes"})


def agent(*answers: Any, **config: Any) -> Agent:
    return Agent("scripted", model=Script(answers), tools=[put, odd], **config)


SHOPPING = (call(("put", {"what": "tea"})), call(("put", {"what": "milk"})), say("done"))


async def test_what_tools_return_is_kept_from_step_to_step(redis_url: str) -> None:
    """STATE-06: a step's updates count from its commit on; its log alone gives them again."""
    async with bench(redis_url, agent(*SHOPPING)) as desk:
        run_id = await desk.create()
        await Hands(desk, desk.agent).finish(run_id)
        stored = await desk.stored(run_id)
        assert stored.state.custom_state == {"basket": ["tea", "milk"]}
        assert stored.state.last_result == "2 in the basket"
        assert stored.state.last_output == "done"
        now = await desk.runs.now()
        rebuilt = revise(stored.state, stored.log, {}, now)
        assert rebuilt.state.custom_state == stored.state.custom_state
        further = further_turn(stored.state, stored.log, {}, now)
        assert further.state.custom_state == stored.state.custom_state


async def test_an_update_survives_the_crash_behind_its_tool(redis_url: str) -> None:
    """STATE-06: it is journaled with the result, and made once."""
    two = (call(("put", {"what": "tea"}), ("put", {"what": "milk"})), say("done"))
    async with bench(redis_url, agent(*two), lease=0.5, grace=60) as desk:
        run_id = await desk.create()
        hands = Hands(desk, desk.agent, crash_at="tool-started:2")
        with pytest.raises(Crash):
            await hands.step(run_id, 0)
        await lease_runs_out(desk, run_id)
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
    first, second = stored.result().steps[0].tool_calls
    assert first.custom_state == {"basket": ["tea"]}
    assert second.error is not None
    assert stored.state.custom_state == {"basket": ["tea"]}


async def test_an_update_that_cannot_be_stored_is_the_tools_error(redis_url: str) -> None:
    """STATE-06"""
    async with bench(redis_url, agent(call(("odd", {})))) as desk:
        run_id = await desk.create()
        await Hands(desk, desk.agent).finish(run_id)
        stored = await desk.stored(run_id)
    assert "is bytes" in str(stored.result().error)
    assert stored.state.custom_state == {}
