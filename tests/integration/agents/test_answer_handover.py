"""An answer, or half of one, survives crashes, retries and further turns."""

import pytest
from pydantic import BaseModel
from support.runs.opened_runs import lease_runs_out, opened_run
from support.runs.scripted_steps import Crash, Hands, call, say

from stepfleet.orchestrator import AsyncFleet, RunStatus
from stepfleet.orchestrator.protocol.fold import rebuild
from stepfleet.orchestrator.records.outcome import RunAnswer


class City(BaseModel):
    people: int


CITY = {"people": 700_000}
TEXT = call(("final_answer", {"answer": "Oslo"}))
DATA = call(("structured_response", {"structured": CITY}))


@pytest.mark.parametrize(
    "point", ["after-claim", "after-reply", "after-tools", "before-commit", "after-commit"]
)
@pytest.mark.parametrize("step", [0, 1])
async def test_an_answer_is_taken_once_whatever_ends_the_worker(
    redis_url: str, point: str, step: int
) -> None:
    """ANS-18, ANS-07: no crash makes an answer come twice, or go missing."""
    async with opened_run(redis_url, TEXT, DATA, output_type=City) as (desk, hands, run_id):
        if step:
            await hands.step(run_id, 0)
        crashing = Hands(desk, hands.agent, crash_at=point)
        with pytest.raises(Crash):
            await crashing.step(run_id, step)
        if point != "after-commit":
            await lease_runs_out(desk, run_id)
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert (result.status, result.output, result.structured) == (RunStatus.COMPLETED, "Oslo", CITY)
    assert [one.tool_calls[0].tool_name for one in result.steps] == [
        "final_answer",
        "structured_response",
    ]
    assert not any(one.tool_calls[0].is_error for one in result.steps)


async def test_each_worker_finds_the_pending_text_in_the_state(redis_url: str) -> None:
    """ANS-18"""
    async with opened_run(redis_url, TEXT, DATA, output_type=City) as (desk, hands, run_id):
        before = (await desk.stored(run_id)).state
        await hands.step(run_id, 0)
        claimed = await desk.claim(run_id, 1)
        assert claimed.state.answer == RunAnswer(text="Oslo")
        again = rebuild(before, (await desk.stored(run_id)).log)
        assert (again.answer, again.messages) == (claimed.state.answer, claimed.state.messages)


async def test_a_run_that_met_its_limit_goes_on_from_its_pending_text(redis_url: str) -> None:
    """ANS-18"""
    async with (
        opened_run(redis_url, TEXT, DATA, output_type=City, max_steps=1) as (desk, hands, run_id),
        AsyncFleet(redis_url) as fleet,
    ):
        await hands.finish(run_id)
        stopped = (await desk.stored(run_id)).result()
        assert (stopped.status, stopped.output) == (RunStatus.MAX_ITERATIONS_REACHED, "Oslo")
        assert stopped.structured is None
        await fleet.runs.retry(run_id, max_steps=5)
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert (result.status, result.output, result.structured) == (RunStatus.COMPLETED, "Oslo", CITY)
    assert result.steps_used == 2


async def test_a_further_turn_is_answered_anew_with_its_own_reminder(redis_url: str) -> None:
    """ANS-07, ANS-11: once per execution."""
    bergen = call(("final_answer", {"answer": "Bergen"}))
    async with (
        opened_run(redis_url, TEXT, say("Bergen"), bergen, require_final_answer=True) as opened,
        AsyncFleet(redis_url) as fleet,
    ):
        desk, hands, run_id = opened
        await hands.finish(run_id)
        assert (await desk.stored(run_id)).result().output == "Oslo"
        await fleet.runs.send(run_id, "and the second largest?")
        assert (await desk.stored(run_id)).state.answer is None
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert (result.status, result.output) == (RunStatus.COMPLETED, "Bergen")
    assert result.steps_used == 3
