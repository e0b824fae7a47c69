"""Strategies in whole steps over a real Redis: state, requests, decisions, errors, retries."""

import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from support.runs.opened_runs import Opened, finish_with_waits, lease_runs_out
from support.runs.scripted_steps import Crash, Hands, Script, call, say
from support.runs.tools import look

from stepfleet.orchestrator import (
    Agent,
    AgentState,
    ConfigurationError,
    ContinuationDecision,
    ErrorPolicy,
    Message,
    ModelRequest,
    NoOp,
    ReAct,
    Role,
    StateChange,
    StopReason,
    Strategy,
    StrategyContext,
    current_invocation,
    tool,
)
from stepfleet.orchestrator.protocol.revision import revise
from stepfleet.orchestrator.records.conversation.messages import Block
from stepfleet.orchestrator.records.steps import StepType


def requests(hands: Hands) -> list[ModelRequest]:
    assert isinstance(hands.agent.llm, Script)
    return hands.agent.llm.requests


def obj(**fields: Any) -> Any:
    return say(json.dumps(fields))


def acts(thought: str, what: str) -> Any:
    action = {"tool": "look", "arguments": {"what": what}}
    return obj(thought=thought, action=action, done=False)


REACT = (
    acts("I look at a", "a"),
    acts("I look at b", "b"),
    obj(thought="I know", action=None, answer="both seen", done=True),
)


async def test_react_in_json_mode_acts_observes_and_answers(opened: Opened) -> None:
    """STRAT-03, STRAT-07, STRAT-12: actions are executed as calls and told as text."""
    async with opened(*REACT, tools=(look,), strategy="react", instructions="Be brief.") as (
        desk,
        hands,
        run_id,
    ):
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
    result = stored.result()
    assert result.stop_reason is StopReason.COMPLETED
    assert result.output == "both seen"
    assert [step.type for step in result.steps] == [
        StepType.TOOL_EXECUTION,
        StepType.TOOL_EXECUTION,
        StepType.FINAL_RESPONSE,
    ]
    assert [one.result for step in result.steps for one in step.tool_calls] == ["seen a", "seen b"]
    history = stored.state.strategy_state["react_history"]
    assert history == [
        {
            "thought": "I look at a",
            "action": {"tool": "look", "arguments": {"what": "a"}},
            "observation": "seen a",
        },
        {
            "thought": "I look at b",
            "action": {"tool": "look", "arguments": {"what": "b"}},
            "observation": "seen b",
        },
        {"thought": "I know", "action": None, "observation": None},
    ]
    third = requests(hands)[2]
    assert third.output is not None
    assert third.tools == ()
    assert not any(one.tool_calls or one.is_tool() for one in third.messages)
    assert third.messages[0].text.startswith("Be brief.\n\nWork in turns of thought")
    assert '"what"' in third.messages[0].text
    assert third.messages[-1] == Message.user("Observation (look): seen b")


async def test_react_with_native_calls_ends_when_no_tool_is_called(opened: Opened) -> None:
    """STRAT-03, STRAT-12: think, act, observe until no tools."""
    script = (
        call(("look", {"what": "a"}), text="I look at a"),
        call(("look", {"what": "b"}), ("look", {"what": "c"}), text="two more"),
        say("all seen"),
    )
    options = {"mode": "text"}
    async with opened(*script, tools=(look,), strategy="react", strategy_options=options) as (
        desk,
        hands,
        run_id,
    ):
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
    assert stored.result().output == "all seen"
    history = stored.state.strategy_state["react_history"]
    assert [one["thought"] for one in history] == ["I look at a", "two more", "all seen"]
    assert [one["observation"] for one in history] == ["seen a", "seen b\nseen c", None]
    assert len(history[1]["action"]) == 2
    assert requests(hands)[0].output is None
    assert [one.name for one in requests(hands)[0].tools] == ["look"]


async def test_react_stops_at_the_ceiling_with_its_last_thought(opened: Opened) -> None:
    """STRAT-12: or ceiling."""
    async with opened(acts("again", "a"), tools=(look,), strategy="react", max_steps=3) as (
        desk,
        hands,
        run_id,
    ):
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.stop_reason is StopReason.STEPS_LIMIT
    assert (result.steps_used, result.output) == (3, "again")


@pytest.mark.parametrize("mode", ["json", "text"])
async def test_chain_of_thought_goes_on_until_its_final_step(opened: Opened, mode: str) -> None:
    """STRAT-04, STRAT-09: without tools too; the driver asks for each further step."""
    if mode == "json":
        script = (
            obj(step=1, reasoning="2 and 2", conclusion="4", final=False),
            obj(step=2, reasoning="4 and 1", conclusion="5", final=True),
        )
    else:
        script = (say("2 and 2 make 4"), say("4 and 1\nFinal answer: 5"))
    async with opened(*script, strategy="cot", strategy_options={"mode": mode}) as (
        desk,
        hands,
        run_id,
    ):
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
    assert stored.result().output == "5"
    steps = stored.state.strategy_state["cot_steps"]
    assert [one["step"] for one in steps] == [1, 2]
    assert [one["conclusion"] for one in steps][-1] == "5"
    first, second = (one.outcome for one in stored.log)
    assert first is not None
    assert second is not None
    assert first.resolved_by == "StrategyContinuation"
    said = [one.get_evaluation_for("StrategyContinuation") for one in (first, second)]
    assert [one.decision for one in said if one] == [
        ContinuationDecision.REQUEST_CONTINUATION,
        ContinuationDecision.ALLOW_STOP,
    ]
    last = requests(hands)[1].messages[-1]
    assert last.is_user()
    assert last.text == "Go on with the next step."


async def test_noop_keeps_no_track_and_its_tool_loop_runs_to_the_end(opened: Opened) -> None:
    """STRAT-02: a stop of the strategy loses against the request of a tool that ran."""
    script = (call(("look", {"what": "a"})), say("done"))
    async with opened(*script, tools=(look,), strategy="noop") as (desk, hands, run_id):
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
    assert stored.result().steps_used == 2
    assert stored.state.strategy_state == {}
    assert NoOp().get_history(stored.state) == []
    first = stored.log[0].outcome
    assert first is not None
    assert first.resolved_by == "ToolCallPresenceCheck"
    said = first.get_evaluation_for("StrategyContinuation")
    assert said is not None
    assert said.decision is ContinuationDecision.ALLOW_STOP


async def test_the_prompt_is_worded_anew_for_each_call(opened: Opened) -> None:
    """STRAT-08: the third request holds the two earlier thoughts; the log holds the prompt."""
    template = "Question: {prompt}\nSo far:\n{history}"
    async with opened(*REACT, tools=(look,), strategy="react", user_template=template) as (
        desk,
        hands,
        run_id,
    ):
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
    prompts = [one.messages[1].text for one in requests(hands)]
    assert prompts[0] == "Question: hello\nSo far:\n"
    assert "thought: I look at a" in prompts[2]
    assert "thought: I look at b" in prompts[2]
    assert "observation: seen b" in prompts[2]
    assert [one.text for one in stored.state.messages if one.role is Role.USER] == ["hello"]


async def test_a_template_needs_no_strategy(opened: Opened) -> None:
    """STRAT-08"""
    async with opened(say("done"), user_template="<{{ prompt }}>{history}") as (
        desk,
        hands,
        run_id,
    ):
        await hands.finish(run_id)
        assert (await desk.stored(run_id)).result().output == "done"
    assert requests(hands)[0].messages[-1].text == "<hello>"


async def test_verbose_logs_each_step(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    """STRAT-05"""
    caplog.set_level(logging.INFO, "stepfleet.strategies.react")
    options = {"verbose": True}
    async with opened(*REACT, tools=(look,), strategy="react", strategy_options=options) as (
        _,
        hands,
        run_id,
    ):
        await hands.finish(run_id)
    lines = [one.getMessage() for one in caplog.records if one.name.endswith("react")]
    assert len(lines) == 3
    assert f"run {run_id} step 1: thought: I look at a" in lines[0]
    assert "observation: seen a" in lines[0]


class Raising(NoOp):
    """Raises in one of its methods, at one step of an execution."""

    def __init__(self, where: str, at: int = 2) -> None:
        super().__init__()
        self.where = where
        self.at = at

    async def process_step(
        self,
        parsed_output: Any,
        tool_result_blocks: Sequence[Block],
        state: AgentState,
        context: StrategyContext,
    ) -> StateChange | None:
        if self.where == "process_step" and context.iteration == self.at:
            raise KeyError("lost")
        return None

    def should_continue(self, parsed_output: Any) -> bool:
        if self.where == "should_continue" and parsed_output == "done":
            raise KeyError("lost")
        return False

    def prepare_messages(
        self, messages: tuple[Message, ...], state: AgentState
    ) -> tuple[Message, ...]:
        if self.where == "prepare_messages" and state.step_count + 1 == self.at:
            raise KeyError("lost")
        return messages


@pytest.mark.parametrize("where", ["process_step", "should_continue", "prepare_messages"])
async def test_a_strategy_that_raises_is_an_error_of_its_step(opened: Opened, where: str) -> None:
    """STRAT-11, ERR-25: named by strategy and method; the policy decides, and stops."""
    script = (call(("look", {"what": "a"})), say("done"))
    async with opened(*script, tools=(look,), strategy=Raising(where)) as (desk, hands, run_id):
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
        events, _ = await desk.runs.events(run_id)
    assert result.stop_reason is StopReason.ERROR
    assert result.outcome is not None
    assert result.outcome.resolved_by == "ErrorPolicyCriterion"
    assert events[-1]["payload"]["status"] == "failed"
    assert result.steps[1].duration_ms > 0
    assert [step.type for step in result.steps] == [StepType.TOOL_EXECUTION, StepType.ERROR]
    assert result.steps[1].errors[0].message == f"Raising.{where} failed: KeyError: 'lost'"


async def test_a_policy_that_retries_gives_a_failed_strategy_another_step(opened: Opened) -> None:
    """STRAT-11: the policy decides."""
    policy = ErrorPolicy.retry_all(3)
    strategy = Raising("prepare_messages", at=1)
    async with opened(say("done"), strategy=strategy, error_policy=policy) as (
        desk,
        hands,
        run_id,
    ):
        await finish_with_waits(hands, run_id, within=60)
        result = (await desk.stored(run_id)).result()
    assert [step.type for step in result.steps] == [StepType.ERROR, StepType.FINAL_RESPONSE]
    assert result.success


async def test_an_unreadable_answer_is_reported_to_the_model(opened: Opened) -> None:
    """STRAT-07: twice in a row; the answer in time counts."""
    script = (say("well..."), say('{"thought": '), obj(thought="x", answer="y", done=True))
    async with opened(*script, strategy="react") as (desk, hands, run_id):
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
    assert stored.result().output == "y"
    assert "holds no JSON object" in requests(hands)[1].messages[-1].text
    assert "not valid JSON" in requests(hands)[2].messages[-1].text
    assert stored.state.strategy_state["unreadable_answers"] == 0


async def test_three_unreadable_answers_in_a_row_are_an_error(opened: Opened) -> None:
    """STRAT-07, STRAT-11: and the retry of the run asks the model anew."""
    async with opened(say("well..."), strategy="react") as (desk, hands, run_id):
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
        result = stored.result()
        assert result.stop_reason is StopReason.ERROR
        assert result.steps_used == 3
        assert "3 answers in a row could not be read" in result.steps[2].errors[0].message
        revision = revise(stored.state, stored.log, {}, await desk.runs.now())
    assert revision.step == 2
    assert revision.journal == []
    assert revision.state.strategy_state["unreadable_answers"] == 2


async def test_a_json_action_is_not_run_twice_after_a_crash(opened: Opened) -> None:
    """STRAT-07: it has the journal and the idempotency key of any call."""
    keys: list[str] = []

    @tool(idempotent=True)
    def effect(what: str) -> str:
        """Have an effect."""
        keys.append(current_invocation().idempotency_key)
        return what

    action = {"tool": "effect", "arguments": {"what": "x"}}
    script = (obj(thought="act", action=action), obj(answer="ok", done=True))
    async with opened(*script, tools=(effect,), strategy="react") as (desk, hands, run_id):
        hands.crash_at = "before-commit"
        with pytest.raises(Crash):
            await hands.step(run_id, 0)
        await lease_runs_out(desk, run_id)
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
    assert stored.result().output == "ok"
    assert len(set(keys)) == 1 < len(keys)
    assert len(stored.state.strategy_state["react_history"]) == 2


async def test_a_resumed_run_goes_on_with_its_history(opened: Opened) -> None:
    """STRAT-10: stopped at its limit, taken up with a raised one, the history goes on."""
    async with opened(*REACT, tools=(look,), strategy="react", max_steps=1) as (
        desk,
        hands,
        run_id,
    ):
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
        revision = revise(stored.state, stored.log, {"max_steps": 5}, await desk.runs.now())
        await desk.control.retry(stored, revision)
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
    assert stored.result().output == "both seen"
    history = stored.state.strategy_state["react_history"]
    assert [one["thought"] for one in history] == ["I look at a", "I look at b", "I know"]


class Counting(Strategy):
    """Counts its turns where sessions keep it, and shows the model its number."""

    async def process_step(
        self,
        parsed_output: Any,
        tool_result_blocks: Sequence[Block],
        state: AgentState,
        context: StrategyContext,
    ) -> StateChange | None:
        return StateChange(
            strategy={"last": parsed_output},
            append={"seen": [len(tool_result_blocks)]},
            custom={"turns": state.custom_state.get("turns", 0) + 1},
        )

    def should_continue(self, parsed_output: Any) -> bool:
        return bool(parsed_output == "more")

    def get_history(self, state: AgentState) -> list[Any]:
        return list(state.strategy_state.get("seen", ()))

    def prepare_messages(
        self, messages: tuple[Message, ...], state: AgentState
    ) -> tuple[Message, ...]:
        return (*messages, Message.user(f"turn {state.custom_state.get('turns', 0) + 1}"))


async def test_a_custom_strategy_prepares_messages_and_writes_both_states(opened: Opened) -> None:
    """STRAT-06, STRAT-13, STATE-06: what it prepares is sent and never stored."""
    script = (call(("look", {"what": "a"})), say("more"), say("done"))
    async with opened(*script, tools=(look,), strategy=Counting()) as (desk, hands, run_id):
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
    assert stored.state.strategy_state == {
        "last": "done",
        "seen": [1, 0, 0],
        "should_continue": False,
    }
    assert stored.state.custom_state == {"turns": 3}
    assert [one.messages[-1].text for one in requests(hands)] == ["turn 1", "turn 2", "turn 3"]
    assert not any("turn" in one.text for one in stored.state.messages)


async def test_the_log_alone_gives_the_same_strategy_state(opened: Opened) -> None:
    """STRAT-10: a state rebuilt from the log equals the one that was handed on."""
    async with opened(*REACT, tools=(look,), strategy="react") as (desk, hands, run_id):
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
        revision = revise(stored.state, stored.log, {}, await desk.runs.now())
    assert revision.state.strategy_state == stored.state.strategy_state
    sizes = [len(one.progress.to_json()) for one in stored.log if one.progress]
    assert max(sizes) < 2 * min(sizes)  # each step writes its own entry, not the history


async def test_a_change_that_cannot_be_stored_is_an_error_of_the_step(opened: Opened) -> None:
    """STRAT-11"""

    class Odd(NoOp):
        async def process_step(self, *_: Any) -> StateChange | None:
            return StateChange(strategy={"at": object()})

    async with opened(say("done"), strategy=Odd()) as (desk, hands, run_id):
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert "Odd.process_step: its change cannot be stored" in result.steps[0].errors[0].message
    assert isinstance(ReAct(), Strategy)


async def test_an_answer_contract_is_kept_by_an_action_in_json_mode(opened: Opened) -> None:
    """STRAT-07, STRAT-09, ANS-08: the contract's tool is worded as all tools are."""
    answer = {"tool": "final_answer", "arguments": {"answer": "42"}}
    script = (
        obj(thought="I know", answer="42", done=True),
        obj(thought="by the tool", action=answer, done=False),
    )
    async with opened(*script, strategy="react", require_final_answer=True) as (
        desk,
        hands,
        run_id,
    ):
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
    result = stored.result()
    assert (result.output, result.steps_used) == ("42", 2)
    assert result.stop_reason is StopReason.COMPLETED
    assert all(one.tools == () for one in requests(hands))
    assert "- final_answer: " in requests(hands)[0].messages[0].text
    assert requests(hands)[1].messages[-1].is_user()
    assert not requests(hands)[1].messages[-1].is_prompt()


def test_a_provider_cannot_write_the_contracts_json_and_the_strategys() -> None:
    """STRAT-07, CONF-04"""
    schema = {"title": "City", "type": "object", "properties": {"name": {"type": "string"}}}
    with pytest.raises(ConfigurationError, match="'answer_mode': 'native' and the JSON mode of"):
        Agent("a", model="openai:m", strategy="cot", output_type=schema, answer_mode="native")
