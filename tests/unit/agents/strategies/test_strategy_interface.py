import inspect
from datetime import UTC, datetime
from typing import Any

import pytest
from support.runs.agent_records import a_state

from stepfleet.orchestrator import (
    ChainOfThought,
    LLMResponse,
    NoOp,
    ReAct,
    StateChange,
    Strategy,
    StrategyContext,
    ToolCall,
    ToolCallRecord,
)
from stepfleet.orchestrator.agents.strategies.strategy import result_blocks

CALL = ToolCall(id="c", name="look", arguments={"what": "a"})
RECORD = ToolCallRecord(tool_name="look", call_id="c", timestamp=datetime(2026, 1, 1, tzinfo=UTC))
SEEN = StrategyContext(
    run_id="r",
    step=1,
    iteration=1,
    response=LLMResponse(content="x"),
    calls=(CALL,),
    records=(RECORD,),
    texts=("seen",),
)


def test_a_strategy_has_three_abstract_methods() -> None:
    """STRAT-01"""
    assert Strategy.__abstractmethods__ == {"process_step", "should_continue", "get_history"}
    with pytest.raises(TypeError, match="abstract"):
        Strategy()  # type: ignore[abstract]


@pytest.mark.parametrize("kind", [NoOp, ReAct, ChainOfThought])
def test_each_built_in_strategy_has_the_interface(kind: type[Strategy]) -> None:
    """STRAT-01"""
    assert inspect.iscoroutinefunction(kind.process_step)
    names = list(inspect.signature(kind.process_step).parameters)
    assert names == ["self", "parsed_output", "tool_result_blocks", "state", "context"]
    assert list(inspect.signature(kind.should_continue).parameters) == ["self", "parsed_output"]
    assert kind().get_history(a_state()) == []


def test_results_reach_a_strategy_as_blocks() -> None:
    """STRAT-01"""
    failed = RECORD.model_copy(update={"is_error": True})
    assert result_blocks([RECORD, failed], ["seen", "no"]) == (
        {"toolResult": {"toolUseId": "c", "content": [{"text": "seen"}], "status": "success"}},
        {"toolResult": {"toolUseId": "c", "content": [{"text": "no"}], "status": "error"}},
    )


@pytest.mark.parametrize(
    ("parsed", "thought"),
    [
        ({"thought": "hm", "done": False}, "hm"),
        ({"thought": {"deep": 1}}, '{"deep": 1}'),
        ({"thought": None}, ""),
        ({}, ""),
        ("prose", "prose"),
    ],
)
async def test_react_notes_thought_action_and_observation(parsed: Any, thought: str) -> None:
    """STRAT-03"""
    blocks = result_blocks([RECORD], ["seen it all"])
    change = await ReAct(observation_limit=4).process_step(parsed, blocks, a_state(), SEEN)
    entry = {
        "thought": thought,
        "action": {"tool": "look", "arguments": {"what": "a"}},
        "observation": "seen... (7 more)",
    }
    assert change == StateChange(append={"react_history": [entry]})


@pytest.mark.parametrize(
    ("parsed", "goes_on"),
    [
        ({"done": False}, True),
        ({}, True),
        ({"done": "false"}, True),
        ({"done": True}, False),
        ({"done": "True"}, False),
        ("prose", False),
    ],
)
def test_react_goes_on_until_done(parsed: Any, goes_on: bool) -> None:
    """STRAT-03"""
    assert ReAct().should_continue(parsed) is goes_on


@pytest.mark.parametrize(
    ("parsed", "answer"),
    [
        ({"answer": "42", "thought": "t"}, "42"),
        ({"answer": {"n": 42}}, '{"n": 42}'),
        ({"thought": "t"}, "t"),
        ({}, None),
        ("prose", None),
    ],
)
def test_reacts_answer_is_its_answer_or_while_there_is_none_its_thought(
    parsed: Any, answer: str | None
) -> None:
    assert ReAct().answer(parsed) == answer


@pytest.mark.parametrize(
    ("parsed", "entry", "goes_on", "answer"),
    [
        (
            {"step": 2, "reasoning": "r", "conclusion": "c", "final": True},
            {"step": 2, "reasoning": "r", "conclusion": "c"},
            False,
            "c",
        ),
        (
            {"reasoning": "r"},
            {"step": 1, "reasoning": "r", "conclusion": ""},
            True,
            None,
        ),
        ("thinking", {"step": 1, "reasoning": "thinking", "conclusion": ""}, True, None),
        (
            "so\n**Final Answer:** 42",
            {"step": 1, "reasoning": "so", "conclusion": "42"},
            False,
            "42",
        ),
    ],
)
async def test_chain_of_thought_notes_steps_until_the_final_one(
    parsed: Any, entry: dict[str, Any], goes_on: bool, answer: str | None
) -> None:
    """STRAT-04"""
    chain = ChainOfThought()
    assert await chain.process_step(parsed, (), a_state(), SEEN) == StateChange(
        append={"cot_steps": [entry]}
    )
    assert chain.should_continue(parsed) is goes_on
    assert chain.answer(parsed) == answer


async def test_noop_notes_nothing() -> None:
    """STRAT-02"""
    strategy = NoOp()
    assert await strategy.process_step("x", (), a_state(), SEEN) is None
    assert strategy.should_continue("x") is False
    assert strategy.get_history(a_state(strategy_state={"react_history": [1]})) == []
