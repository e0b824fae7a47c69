"""Planning turns in whole steps over a real Redis."""

import json
from typing import Any

from support.runs.opened_runs import Opened, finish_with_waits
from support.runs.scripted_steps import Hands, Script, call, say
from support.runs.tools import look

from stepfleet.orchestrator import (
    ErrorPolicy,
    Message,
    ModelRequest,
    Planning,
    PlanningStep,
    StopReason,
    tool,
)
from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.protocol.revision import further_turn, revise
from stepfleet.orchestrator.records.steps import StepType

PLAN = "My plan:\n1. [ ] look\n2. [ ] answer"


def requests(hands: Hands) -> list[ModelRequest]:
    assert isinstance(hands.agent.llm, Script)
    return hands.agent.llm.requests


LOOK = call(("look", {"what": "a"}), text="looking")
P, T, F = StepType.PLANNING, StepType.TOOL_EXECUTION, StepType.FINAL_RESPONSE


async def test_plan_tool_and_answer_are_three_steps(opened: Opened) -> None:
    """PLAN-05, PLAN-06: the plan is no answer, has its usage, and stands in the conversation."""
    async with opened(say(PLAN), LOOK, say("done"), tools=(look,), planning=Planning()) as (
        desk,
        hands,
        run_id,
    ):
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
    result = stored.result()
    assert [step.type for step in result.steps] == [P, T, F]
    assert (result.output, result.stop_reason) == ("done", StopReason.COMPLETED)
    assert result.steps[0].usage is not None
    assert result.steps[0].usage.total_tokens == 15
    assert result.usage.total_tokens == 45
    assert stored.log[0].outcome is not None
    assert stored.log[0].outcome.resolved_by == "PlanToCarryOut"
    assert result.agent_steps()[0] == PlanningStep(plan=PLAN)
    assert stored.state.messages[:2] == (Message.user("hello"), Message.assistant(PLAN))
    assert stored.state.messages[2].text == "Carry out the plan."


async def test_a_planning_turn_asks_for_an_approach_and_lets_no_tool_be_called(
    opened: Opened,
) -> None:
    """PLAN-01, PLAN-06: the question itself is not stored."""
    async with opened(say(PLAN), LOOK, say("done"), tools=(look,), planning=Planning()) as (
        desk,
        hands,
        run_id,
    ):
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
    first, second, _ = requests(hands)
    assert first.tool_choice == "none"
    assert "Task: hello" in first.messages[-1].text
    assert "Tools: look." in first.messages[-1].text
    assert second.tool_choice == "auto"
    assert not any("Task: hello" in one.text for one in stored.state.messages)


async def test_planning_comes_again_after_every_k_steps(opened: Opened) -> None:
    """PLAN-02, PLAN-06: with the iteration, and the plan as it stands."""
    script = (say(PLAN), LOOK, LOOK, say("1. [x] look\n2. [~] answer"), LOOK, say("done"))
    planning = Planning(every=2)
    async with opened(*script, tools=(look,), planning=planning) as (desk, hands, run_id):
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
    assert [step.type for step in stored.result().steps] == [P, T, T, P, T, F]
    question = requests(hands)[3].messages[-1].text
    assert "iteration 4" in question
    assert "1. [ ] look\n2. [ ] answer" in question
    states = [step["state"] for step in stored.state.strategy_state["plan"]]
    assert states == ["completed", "in_progress"]


async def test_planning_without_a_start_waits_its_steps(opened: Opened) -> None:
    """PLAN-06"""
    planning = Planning(at_start=False, every=1)
    script = (LOOK, say("no list, and done"), say("done"))
    async with opened(*script, tools=(look,), planning=planning) as (desk, hands, run_id):
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
    assert [step.type for step in stored.result().steps] == [T, P, F]
    assert "plan" not in stored.state.strategy_state
    assert stored.state.messages[-2].text == "Go on with the task."


async def test_a_planning_turn_that_failed_is_made_again(opened: Opened) -> None:
    """PLAN-06"""
    policy = ErrorPolicy.retry_all(3)
    flaky = [ModelError("no"), say(PLAN)]

    async def first(_: ModelRequest) -> Any:
        answer = flaky.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    script = (first, say("done"))
    async with opened(*script, planning=Planning(), error_policy=policy) as (desk, hands, run_id):
        await finish_with_waits(hands, run_id, within=60)
        result = (await desk.stored(run_id)).result()
    assert [step.type for step in result.steps] == [StepType.ERROR, P, F]


async def test_a_call_in_a_planning_turn_is_answered_and_never_run(opened: Opened) -> None:
    """PLAN-06: a model that calls a tool all the same reads why, and no step fails."""
    ran: list[str] = []

    @tool(name="look")
    def looking(what: str) -> str:
        """Look."""
        ran.append(what)
        return what

    async with opened(LOOK, LOOK, say("done"), tools=(looking,), planning=Planning()) as (
        desk,
        hands,
        run_id,
    ):
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
    assert [step.type for step in stored.result().steps] == [P, T, F]
    assert ran == ["a"]
    assert "this turn only plans" in stored.state.messages[2].text


async def test_the_model_says_how_far_a_step_of_the_plan_is(opened: Opened) -> None:
    """PLAN-07: beside other calls of the turn; a call that does not fit changes nothing."""
    turn = call(
        ("update_plan", {"step": 1, "state": "completed"}),
        ("look", {"what": "a"}),
        ("update_plan", {"step": 9, "state": "blocked"}),
        ("update_plan", {"step": 2, "state": "lost"}),
    )
    planning = Planning(tracked=True)
    async with opened(say(PLAN), turn, say("done"), tools=(look,), planning=planning) as (
        desk,
        hands,
        run_id,
    ):
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
    assert stored.result().success
    assert [step["state"] for step in stored.state.strategy_state["plan"]] == [
        "completed",
        "pending",
    ]
    records = stored.result().steps[1].tool_calls
    assert [one.is_error for one in records] == [False, False, True, True]
    assert records[0].result == "1. [x] look\n2. [ ] answer"
    assert records[2].error is not None
    assert records[2].error.message == "the plan has no step 9; its steps are 1 to 2"
    assert records[3].error is not None
    assert "field 'state'" in records[3].error.message
    assert [one.name for one in requests(hands)[1].tools] == ["look", "update_plan"]


async def test_a_resumed_run_keeps_its_plan_and_a_further_turn_plans_anew(opened: Opened) -> None:
    """PLAN-07, STRAT-10"""
    script = (say("My plan:\n1. [x] look\n2. [!] answer\n3. rest"), LOOK, say("done"))
    async with opened(*script, tools=(look,), planning=Planning(), max_steps=2) as (
        desk,
        hands,
        run_id,
    ):
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
        plan = stored.state.strategy_state["plan"]
        assert [one["state"] for one in plan] == ["completed", "blocked", "pending"]
        revision = revise(stored.state, stored.log, {"max_steps": 5}, await desk.runs.now())
        await desk.control.retry(stored, revision)
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
        assert stored.result().output == "done"
        assert stored.state.strategy_state["plan"] == plan
        further = further_turn(stored.state, stored.log, {}, await desk.runs.now())
    assert further.state.strategy_state == {}


async def test_planning_leaves_the_strategy_alone(opened: Opened) -> None:
    """PLAN-06, STRAT-03: a plan is prose in JSON mode too, and no entry of the history."""
    script = (
        say(PLAN),
        say(json.dumps({"thought": "t", "action": {"tool": "look", "arguments": {"what": "a"}}})),
        say(PLAN),
        say(json.dumps({"thought": "u", "answer": "done", "done": True})),
    )
    planning = Planning(every=1)
    async with opened(*script, tools=(look,), planning=planning, strategy="react") as (
        desk,
        hands,
        run_id,
    ):
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
    assert [step.type for step in stored.result().steps] == [P, T, P, F]
    assert stored.result().output == "done"
    history = stored.state.strategy_state["react_history"]
    assert [one["thought"] for one in history] == ["t", "u"]
    asked = requests(hands)
    assert [one.output is None for one in asked] == [True, False, True, False]
    assert not any(one.is_tool() or one.tool_calls for one in asked[2].messages)
    assert asked[2].tools == ()


async def test_a_plan_is_no_answer_under_a_contract(opened: Opened) -> None:
    """PLAN-06: it is not told to call the answer's tool, which is not on offer yet."""
    answer = call(("final_answer", {"answer": "42"}))
    script = (say(PLAN), LOOK, answer)
    async with opened(
        *script, tools=(look,), planning=Planning(tracked=True), require_final_answer=True
    ) as (desk, hands, run_id):
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
    assert [step.type for step in stored.result().steps] == [P, T, F]
    assert stored.result().output == "42"
    assert [one.text for one in stored.state.messages if one.is_user()] == [
        "hello",
        "Carry out the plan.",
    ]
    offered = [[one.name for one in asked.tools] for asked in requests(hands)]
    assert offered[0] == ["look"]
    assert set(offered[1]) == {"look", "update_plan", "final_answer"}


async def test_an_update_in_a_turn_that_was_refused_does_not_count(opened: Opened) -> None:
    """PLAN-07: an answer comes alone; what stood beside it was told not to have happened."""
    mixed = call(
        ("final_answer", {"answer": "42"}), ("update_plan", {"step": 1, "state": "completed"})
    )
    script = (say(PLAN), mixed, call(("final_answer", {"answer": "42"})))
    async with opened(*script, planning=Planning(tracked=True), require_final_answer=True) as (
        desk,
        hands,
        run_id,
    ):
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
    assert stored.result().output == "42"
    assert [one["state"] for one in stored.state.strategy_state["plan"]] == ["pending", "pending"]
