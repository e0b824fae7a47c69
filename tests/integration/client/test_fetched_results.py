"""What the acceptance checks name, as a client gets it: by `Fleet`, from the store."""

import asyncio
from datetime import datetime

from support.deadlines import until
from support.runs.scripted_steps import Script, call, say
from support.runs.tools import look

from stepfleet.orchestrator import (
    Agent,
    AgentRunResult,
    AsyncFleet,
    ContinuationDecision,
    ErrorPolicy,
    StopReason,
)
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.worker.runtime.inline import InlineWorker

SOON = 5.0
"""Seconds: a follower looks every quarter of a second, and machines have other work."""


async def fetched(redis_url: str, agent: Agent) -> AgentRunResult:
    """Run the agent, and fetch the result with a client of its own."""
    async with AsyncFleet(redis_url) as fleet:
        run_id = await fleet.submit(agent, "hello")
    async with InlineWorker(load_settings(redis_url=redis_url), [agent]) as worker:
        await worker.finish(run_id)
    async with AsyncFleet(redis_url) as other:
        return await other.runs.result(run_id)


async def test_a_fetched_result_has_every_field_with_its_type(redis_url: str) -> None:
    """RUN-02: the schema of what a client gets, and of its JSON."""
    script = Script([call(("look", {"what": "a"}), ("look", {"what": "b"})), say("done")])
    result = await fetched(redis_url, Agent("full", model=script, tools=[look], max_steps=7))
    assert (result.agent_name, result.output, str(result.status)) == ("full", "done", "completed")
    assert [step.step for step in result.steps] == [1, 2]
    assert result.usage.total_tokens == 30
    assert (result.tool_calls_total, result.tool_calls_by_name) == (2, {"look": 2})
    assert isinstance(result.start_time, datetime)
    assert isinstance(result.end_time, datetime)
    assert result.duration_seconds == (result.end_time - result.start_time).total_seconds()
    assert (result.error, result.max_iterations) == (None, 7)
    named = {
        *("agent_name", "output", "status", "steps", "usage", "tool_calls_total"),
        *("tool_calls_by_name", "start_time", "end_time", "duration_seconds", "error"),
        "max_iterations",
    }
    assert named <= result.to_dict().keys()
    assert AgentRunResult.model_validate(result.to_dict()) == result


async def test_the_steps_of_a_fetched_run_are_its_golden_list(redis_url: str) -> None:
    """RUN-25: all but planning, tagged by type, in their order."""
    script = Script([call(("look", {"what": "a"})), call(("look", {})), say("done")])
    policy = ErrorPolicy.retry_tool_errors(3)
    result = await fetched(
        redis_url, Agent("traced", model=script, tools=[look], error_policy=policy)
    )
    told = [step.model_dump(mode="json") for step in result.agent_steps("hello")]
    failed, second = told[4].pop("result"), told[3]["tool_call_id"]
    assert second != "c0", "the id of an earlier call is not used again"
    assert "VALIDATION_ERROR" in str(failed)
    assert [{key: one[key] for key in one if key in _SHOWN} for one in told] == [
        {"type": "task", "content": "hello"},
        {"type": "action", "tool_name": "look", "tool_call_id": "c0", "arguments": {"what": "a"}},
        {"type": "observation", "tool_call_id": "c0", "result": "seen a", "is_error": False},
        {"type": "action", "tool_name": "look", "tool_call_id": second, "arguments": {}},
        {"type": "observation", "tool_call_id": second, "is_error": True},
        {"type": "final_answer", "answer": "done", "structured": None},
    ]


_SHOWN = frozenset(
    {
        *("type", "content", "tool_name", "tool_call_id", "arguments", "result", "is_error"),
        *("answer", "structured"),
    }
)


async def test_the_outcomes_of_a_run_tell_why_it_went_on_and_why_it_was_forbidden(
    redis_url: str,
) -> None:
    """CONT-09: each field, in both scenarios, as it is stored."""
    script = Script([call(("look", {"what": "a"}))])
    agent = Agent("limited", model=script, tools=[look], max_steps=2)
    async with AsyncFleet(redis_url) as fleet:
        run_id = await fleet.submit(agent, "hello")
        async with InlineWorker(load_settings(redis_url=redis_url), [agent]) as worker:
            await worker.finish(run_id)
        went_on, forbidden = [one.outcome for one in (await fleet.runs.show(run_id)).log]
    assert went_on is not None
    assert forbidden is not None
    assert went_on.should_continue
    assert went_on.decision is ContinuationDecision.REQUEST_CONTINUATION
    assert went_on.resolved_by.endswith("ToolCallPresenceCheck")
    assert not forbidden.should_continue
    assert forbidden.decision is ContinuationDecision.FORBID_CONTINUATION
    assert forbidden.resolved_by.endswith("StepsLimit")
    assert forbidden.stop_reason is StopReason.STEPS_LIMIT
    assert {one.criterion for one in forbidden.evaluations} == {
        one.criterion for one in went_on.evaluations
    }


async def test_each_step_is_heard_soon_and_before_the_next_one_begins(redis_url: str) -> None:
    """STRM-04: the model answers only when the follower has heard of the step before."""
    heard: dict[int, float] = {}
    asked: dict[int, float] = {}
    clock = asyncio.get_running_loop().time

    async def answer(request: object) -> object:
        turn = len(asked) + 1
        # The step before was committed no later than this call began.
        asked[turn] = clock()
        await until(lambda: _has(heard, turn - 1), within=60, what=f"news of step {turn - 1}")
        return say("done") if turn == STEPS else call(("look", {"what": str(turn)}))

    agent = Agent("slow", model=Script([answer] * STEPS), tools=[look], max_steps=STEPS)
    async with (
        AsyncFleet(redis_url) as fleet,
        InlineWorker(load_settings(redis_url=redis_url), [agent]) as worker,
    ):
        run_id = await fleet.submit(agent, "hello")
        work = asyncio.create_task(worker.finish(run_id))
        async for event in fleet.runs.events(run_id, follow=True):
            if event["type"] == "agent.step.completed":
                heard[event["payload"]["step_number"]] = clock()
        await work
    assert sorted(heard) == list(range(1, STEPS + 1))
    waits = [heard[number] - asked[number + 1] for number in range(1, STEPS)]
    assert sorted(waits)[len(waits) // 2] < SOON


STEPS = 8


async def _has(heard: dict[int, float], number: int) -> bool:
    return number == 0 or number in heard
