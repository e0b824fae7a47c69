"""An agent's answer contract: stored with its configuration, refused where it cannot be kept."""

from typing import Any

import pytest
from pydantic import BaseModel
from support.runs.agent_records import a_state

from stepfleet.orchestrator import (
    Agent,
    AgentConfig,
    AgentState,
    ConfigurationError,
    ContinuationDecision,
    ReturnAnswer,
    SpecialTool,
    ToolCall,
    tool,
)
from stepfleet.orchestrator.agents.agent import contract_of, criteria_of, reasoner_of
from stepfleet.orchestrator.agents.answers import ErrorSink, Outcome
from stepfleet.orchestrator.records.outcome import RunAnswer


class City(BaseModel):
    people: int


@tool(name="final_answer")
def own_answer() -> str:
    """Answer."""
    return "done"


@tool
def look() -> str:
    """Look."""
    return "seen"


def stops(call: ToolCall, state: AgentState, sink: ErrorSink) -> Outcome:
    return ReturnAnswer("stopped")


STOP = SpecialTool(name="stop_here", description="Stop.", handler=stops)


def agent(**given: Any) -> Agent:
    return Agent("solver", model="openai:m", **given)


def test_the_stored_configuration_holds_the_schema_and_reads_back_equal() -> None:
    """ANS-14"""
    config = agent(output_type=City).config
    again = AgentConfig.from_json(config.to_json())
    assert again == config
    assert again.digest == config.digest
    assert again.output_schema is not None
    assert again.output_schema["title"] == "City"
    assert contract_of(again, ()) is not None


def test_without_a_contract_nothing_is_stored_and_no_reasoner_is_made() -> None:
    plain = agent(tools=[look])
    assert not {"output_schema", "answer_mode", "special_tools", "require_final_answer"} & set(
        AgentConfig.model_validate_json(plain.config.to_json()).model_fields_set
    )
    assert reasoner_of(plain.config, plain) is None


def test_a_run_may_have_a_schema_of_its_own() -> None:
    """ANS-14"""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    config = agent().config.with_overrides({"output_schema": schema})
    assert config.demands_answer
    assert config.output_schema == {**schema, "title": "structured", "additionalProperties": False}


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"output_type": int | None}, "allows null"),
        ({"answer_mode": "native"}, "needs an output_type"),
        (
            {"answer_mode": "native", "output_type": City, "strategy": "react"},
            "both set the form of messages",
        ),
        ({"answer_mode": "loud", "output_type": City}, "field 'answer_mode'"),
        ({"tools": [own_answer], "require_final_answer": True}, "'final_answer' appears twice"),
        ({"special_tools": [STOP, STOP]}, "'stop_here' appears twice"),
        ({"special_tools": [look]}, "give SpecialTool objects"),
        ({"special_tools": ["stop_here"]}, "special_tools holds a str"),
        ({"output_type": City, "tool_choice": "none"}, "'tool_choice': 'none' keeps"),
        ({"special_tools": [STOP], "tool_choice": "none"}, "'tool_choice': 'none' keeps"),
        ({"output_schema": {"type": "array"}}, "field 'output_schema'"),
    ],
)
def test_a_contract_that_cannot_be_kept_is_refused_with_its_fix(
    given: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigurationError, match=match):
        agent(**given)


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ({"answer_mode": "native"}, "needs an output_type"),
        ({"require_final_answer": True}, "'final_answer' appears twice"),
        ({"special_tools": ["stop_here"]}, "cannot be overridden per run"),
        ({"output_schema": {"$ref": "file:///etc/passwd"}}, "nothing is fetched"),
    ],
)
def test_what_a_run_overrides_is_checked_too(overrides: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        agent(tools=[own_answer]).config.with_overrides(overrides)


def test_tools_may_have_the_answer_tools_names_where_no_contract_holds() -> None:
    assert "final_answer" in agent(tools=[own_answer]).tools


def test_a_worker_without_the_runs_special_tool_says_which() -> None:
    """TOOL-21"""
    with pytest.raises(ConfigurationError, match="no special tool 'stop_here'"):
        contract_of(agent(special_tools=[STOP]).config, ())


def test_a_copy_of_an_agent_keeps_its_special_tools() -> None:
    """TOOL-21"""
    assert agent(special_tools=[STOP]).with_cumulative_timeout(5).special_tools == (STOP,)


@pytest.mark.parametrize(
    ("answer", "decision", "reason"),
    [
        (None, "request", "no answer was given yet"),
        (RunAnswer(text="so far"), "request", "its data is awaited"),
        (RunAnswer(text="done", final=True), "forbid", "the answer was given"),
    ],
)
def test_the_contract_requests_work_until_the_answer_is_given(
    answer: RunAnswer | None, decision: str, reason: str
) -> None:
    """ANS-11, ANS-18"""
    demanding = agent(require_final_answer=True, max_steps=1)
    criteria = criteria_of(demanding.config, demanding, reasoner_of(demanding.config, demanding))
    evaluation = criteria.evaluate(a_state(0, answer=answer)).get_evaluation_for(
        "AnswerContractCheck"
    )
    assert evaluation is not None
    assert evaluation.decision is ContinuationDecision(decision)
    assert reason in evaluation.reason


def test_a_further_turn_has_to_be_answered_anew() -> None:
    """ANS-07: once per run, and a further turn is another execution."""
    answered = a_state(2, answer=RunAnswer(text="done", final=True))
    assert answered.next_execution().answer is None
