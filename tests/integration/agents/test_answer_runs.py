"""Runs under an answer contract: what ends them, what does not, and what the model reads."""

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel, TypeAdapter
from support.runs.opened_runs import opened_run
from support.runs.scripted_steps import Script, call, say

from stepfleet.orchestrator import (
    AgentRunResult,
    AgentState,
    Continue,
    FinalAnswer,
    FinishReason,
    MaxStepsExceeded,
    Message,
    ModelErrorCode,
    ModelRequest,
    ReturnAnswer,
    ReturnResult,
    RunStatus,
    SpecialTool,
    StopReason,
    ToolCall,
    tool,
)
from stepfleet.orchestrator.agents.answers import ErrorSink, Outcome
from stepfleet.orchestrator.agents.answers.contract import DEFAULT_TEXT
from stepfleet.orchestrator.records.run.results import StructuredDataError
from stepfleet.orchestrator.records.steps import StepType

Ran = tuple[AgentRunResult, tuple[Message, ...], list[ModelRequest]]
RAN: list[str] = []


class City(BaseModel):
    name: str
    people: int


class Village(City):
    """Another schema."""


CITY = {"name": "Oslo", "people": 700_000}
ANSWER = call(("final_answer", {"answer": "42"}))
DATA = call(("structured_response", {"structured": CITY}))


@tool
def look(what: str) -> str:
    """Look something up."""
    RAN.append(what)
    return f"seen {what}"


async def ran(url: str, *answers: Any, **config: Any) -> Ran:
    """Return what became of a run, its conversation and its requests."""
    RAN.clear()
    async with opened_run(url, *answers, tools=(look,), **config) as (desk, hands, run_id):
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
        script = hands.agent.llm
        assert isinstance(script, Script)
        return stored.result(), stored.state.messages, script.requests


def told(messages: tuple[Message, ...]) -> list[str]:
    """Return what tools and reminders said, in order."""
    return [one.text for one in messages[1:] if one.is_tool() or one.is_user()]


async def test_final_answer_ends_the_run_with_its_text(redis_url: str) -> None:
    """ANS-08, ANS-16"""
    result, messages, _ = await ran(redis_url, ANSWER, require_final_answer=True)
    assert (result.status, result.stop_reason) == (RunStatus.COMPLETED, StopReason.COMPLETED)
    assert (result.output, result.structured, result.steps_used) == ("42", None, 1)
    assert result.outcome is not None
    assert result.outcome.resolved_by == "AnswerContractCheck"
    assert result.steps[0].type is StepType.FINAL_RESPONSE
    assert told(messages)[-1] == "accepted"


async def test_the_terminal_step_is_listed_and_its_tokens_are_counted(redis_url: str) -> None:
    """ANS-16"""
    asked = call(("look", {"what": "a"}))
    result, _, _ = await ran(redis_url, asked, ANSWER, require_final_answer=True)
    assert [step.step for step in result.steps] == [1, 2]
    assert result.steps[-1].tool_calls[0].tool_name == "final_answer"
    spent = [step.usage.total_tokens for step in result.steps if step.usage]
    assert result.usage.total_tokens == sum(spent) == 30
    assert result.usage.llm_calls == 2


async def test_an_answer_with_the_last_allowed_step_completes_the_run(redis_url: str) -> None:
    """ANS-08"""
    result, _, _ = await ran(redis_url, ANSWER, require_final_answer=True, max_steps=1)
    assert result.status is RunStatus.COMPLETED


async def test_only_the_tool_that_gives_the_answer_is_offered_beside_the_agents_own(
    redis_url: str,
) -> None:
    """ANS-03"""
    _, _, plain = await ran(redis_url, say("hi"))
    _, _, text = await ran(redis_url, ANSWER, require_final_answer=True)
    _, _, data = await ran(redis_url, DATA, output_type=City)
    offered = [[spec.name for spec in one[0].tools] for one in (plain, text, data)]
    assert offered == [["look"], ["look", "final_answer"], ["look", "structured_response"]]


async def test_the_instructions_stand_once_in_the_system_message_of_each_request(
    redis_url: str,
) -> None:
    """ANS-04"""
    asked = call(("look", {"what": "a"}))
    answers = (asked, asked, asked, asked, DATA)
    given = {"output_type": City, "instructions": "Be brief."}
    result, messages, requests = await ran(redis_url, *answers, **given)
    assert result.steps_used == len(requests) == 5
    systems = [[one for one in request.messages if one.is_system()] for request in requests]
    assert all(len(one) == 1 for one in systems)
    assert {one[0].text for one in systems} == {systems[0][0].text}
    assert systems[0][0].text.count("call the tool structured_response") == 1
    assert systems[0][0].text.startswith("Be brief.\n\n")
    assert messages[0].text == "Be brief."


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (call(("final_answer", {"answer": "  "})), "is blank"),
        (call(("final_answer", {"text": "42"})), "'answer' is a required property"),
        (call(("final_answer", {"answer": "1"}), ("look", {"what": "a"})), "only call of its turn"),
        (call(("look", {"what": "a"}), ("final_answer", {"answer": "1"})), "only call of its turn"),
        (call(("final_answer", {"answer": "1"}), ("final_answer", {"answer": "2"})), "only call"),
    ],
)
async def test_a_wrong_final_answer_is_an_observation_and_the_run_goes_on(
    redis_url: str, wrong: Any, error: str
) -> None:
    """ANS-07"""
    result, messages, _ = await ran(redis_url, wrong, ANSWER, require_final_answer=True)
    assert (result.status, result.output, result.steps_used) == (RunStatus.COMPLETED, "42", 2)
    assert RAN == []
    assert any(error in text for text in told(messages))
    assert result.steps[0].type is StepType.TOOL_EXECUTION
    assert not result.steps[0].errors
    assert {record.is_error for record in result.steps[0].tool_calls} == {True}


@pytest.mark.parametrize(
    ("mode", "hint"),
    [({}, "on offer: structured_response"), ({"answer_mode": "native"}, "answer without a call")],
)
async def test_a_call_of_no_tool_where_there_are_none_is_an_answer_that_is_asked_for_again(
    redis_url: str, mode: dict[str, Any], hint: str
) -> None:
    """ANS-07"""
    wrong = call(("answer", {"structured": CITY}), ("other", {}))
    right = say(json.dumps(CITY)) if mode else DATA
    async with opened_run(redis_url, wrong, right, output_type=City, **mode) as (desk, hands, name):
        await hands.finish(name)
        stored = await desk.stored(name)
    result = stored.result()
    assert (result.status, result.steps_used) == (RunStatus.COMPLETED, 2)
    assert f"tool 'answer' does not exist; {hint}" in told(stored.state.messages)[0]
    assert result.steps[0].refused.startswith("answer refused: tool 'answer'")
    assert not result.steps[0].errors


async def test_calls_of_a_mixed_turn_are_each_answered_and_can_be_made_again(
    redis_url: str,
) -> None:
    """ANS-07"""
    mixed = call(("look", {"what": "a"}), ("final_answer", {"answer": "1"}))
    again = call(("look", {"what": "a"}))
    result, messages, _ = await ran(redis_url, mixed, again, ANSWER, require_final_answer=True)
    assert RAN == ["a"]
    assert "not run: the same turn gave an answer" in told(messages)[0]
    assert result.steps_used == 3


async def test_with_a_schema_an_answer_without_data_is_noted_and_data_is_awaited(
    redis_url: str,
) -> None:
    """ANS-08, ANS-09"""
    result, messages, _ = await ran(redis_url, ANSWER, DATA, output_type=City)
    assert told(messages)[0].startswith("The answer is noted.")
    assert (result.output, result.structured, result.schema_name) == ("42", CITY, "City")
    assert result.steps_used == 2


async def test_with_a_schema_an_answer_with_valid_data_ends_the_run(redis_url: str) -> None:
    """ANS-08"""
    both = call(("final_answer", {"answer": "Oslo", "structured": CITY}))
    result, _, _ = await ran(redis_url, both, output_type=City)
    assert (result.output, result.structured, result.steps_used) == ("Oslo", CITY, 1)


async def test_final_answer_comes_once(redis_url: str) -> None:
    """ANS-07"""
    again = call(("final_answer", {"answer": "43"}))
    result, messages, _ = await ran(redis_url, ANSWER, again, DATA, output_type=City)
    assert "was given already" in told(messages)[1]
    assert (result.output, result.steps_used) == ("42", 3)


async def test_structured_response_ends_the_run_with_typed_data(redis_url: str) -> None:
    """ANS-09, ANS-15, RUN-21, RUN-22, RUN-23: the data and the schema's name, and no schema."""
    result, _, _ = await ran(redis_url, DATA, output_type=City)
    written = result.to_dict()
    assert (written["structured"], written["schema_name"]) == (CITY, "City")
    assert "properties" not in json.dumps(written)
    assert "Structured output (City):" in result.replay().splitlines()
    with pytest.raises(StructuredDataError, match="'<root>' has the schema 'City'"):
        result.structured_as(Village)
    assert (result.output, result.structured) == (DEFAULT_TEXT, CITY)
    assert result.structured_as(City) == City(name="Oslo", people=700_000)
    assert result.agent_steps()[-1] == FinalAnswer(answer=DEFAULT_TEXT, structured=CITY)


async def test_data_that_does_not_fit_is_reported_by_place_and_can_be_mended(
    redis_url: str,
) -> None:
    """ANS-09"""
    wrong = call(("structured_response", {"structured": {"name": "Oslo", "people": "many"}}))
    result, messages, _ = await ran(redis_url, wrong, DATA, output_type=City)
    assert "people: 'many' is not of type 'integer'" in told(messages)[0]
    assert (result.structured, result.steps_used) == (CITY, 2)


async def test_structured_response_without_a_schema_is_an_error_observation(redis_url: str) -> None:
    """ANS-10"""
    result, messages, _ = await ran(redis_url, DATA, ANSWER, require_final_answer=True)
    assert "no schema for structured data" in told(messages)[0]
    assert (result.output, result.structured, result.steps_used) == ("42", None, 2)
    with pytest.raises(StructuredDataError, match="holds no structured data"):
        result.structured_as(City)


async def test_text_alone_is_answered_by_a_reminder_and_costs_a_step(redis_url: str) -> None:
    """ANS-11"""
    result, messages, requests = await ran(
        redis_url, say("it is 42"), ANSWER, require_final_answer=True
    )
    assert (result.output, result.steps_used) == ("42", 2)
    assert [one.role for one in messages] == ["user", "assistant", "user", "assistant", "tool"]
    assert "Call final_answer" in messages[2].text
    assert requests[1].messages[-1] == messages[2]


async def test_reminders_end_at_the_step_limit_and_the_status_says_so(redis_url: str) -> None:
    """ANS-11"""
    result, _, _ = await ran(redis_url, say("it is 42"), require_final_answer=True, max_steps=3)
    assert (result.status, result.steps_used) == (RunStatus.MAX_ITERATIONS_REACHED, 3)
    assert result.stop_reason is StopReason.STEPS_LIMIT
    assert result.output == "it is 42"


async def test_a_run_without_a_contract_ends_with_its_text_as_ever(redis_url: str) -> None:
    """ANS-11"""
    result, messages, requests = await ran(redis_url, say("it is 42"), instructions="Be brief.")
    assert (result.output, result.steps_used, len(messages)) == ("it is 42", 1, 3)
    assert requests[0].messages[0].text == "Be brief."


NATIVE = {"output_type": City, "answer_mode": "native"}


async def test_in_native_mode_a_valid_message_completes_the_run(redis_url: str) -> None:
    """ANS-17"""
    text = '{"name": "Oslo", "people": 700000}'
    asked = call(("look", {"what": "a"}))
    result, messages, requests = await ran(redis_url, asked, say(text), **NATIVE)
    assert (result.status, result.steps_used) == (RunStatus.COMPLETED, 2)
    assert (result.structured, result.output) == (CITY, text)
    assert result.structured_as(City).people == 700_000
    assert RAN == ["a"]
    assert sum(one.is_user() for one in messages) == 1
    assert requests[0].output is not None
    assert requests[0].output.name == "City"
    assert [spec.name for spec in requests[0].tools] == ["look"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"name": "Oslo"}', "<root>: 'people' is a required property"),
        ("Oslo", "not valid JSON"),
        ('"Oslo"', "<root>: must be a JSON object"),
        ("[" * 100_000, "nested deeper than"),
        ('{"name": "' + "x" * 300_000 + '", "people": 1}', "longer than the limit"),
    ],
)
async def test_in_native_mode_a_message_that_does_not_fit_is_corrected(
    redis_url: str, text: str, error: str
) -> None:
    """ANS-17"""
    fenced = '```json\n{"name": "Oslo", "people": 700000}\n```'
    result, messages, _ = await ran(redis_url, say(text), say(fenced), **NATIVE)
    assert error in told(messages)[0]
    assert (result.structured, result.steps_used) == (CITY, 2)


async def test_a_strategy_in_json_mode_answers_by_the_same_tool(redis_url: str) -> None:
    """ANS-09, ANS-11: the tool is told in words, and called by an action."""

    def thinks(action: dict[str, Any] | None) -> Any:
        return say(json.dumps({"thought": "hm", "action": action, "done": False}))

    action = {"tool": "structured_response", "arguments": {"structured": CITY}}
    script = (thinks(None), thinks(action))
    result, messages, requests = await ran(redis_url, *script, strategy="react", output_type=City)
    assert (result.status, result.structured, result.steps_used) == (RunStatus.COMPLETED, CITY, 2)
    assert requests[0].tools == ()
    assert "- structured_response: " in requests[0].messages[0].text
    assert any("Call structured_response" in text for text in told(messages))


def stop_here(call: ToolCall, state: AgentState, sink: ErrorSink) -> Outcome:
    match call.arguments.get("how"):
        case "data":
            return ReturnResult({"steps": state.step_count + 1})
        case "later":
            sink.report_observation(call, {"wait": True})
            return Continue()
        case how:
            return ReturnAnswer(f"stopped: {how}")


STOP = SpecialTool(
    name="stop_here",
    description="Stop.",
    parameters={"type": "object", "properties": {"how": {"type": "string"}}},
    handler=stop_here,
)


@pytest.mark.parametrize("contract", [{}, {"require_final_answer": True}])
async def test_a_special_tool_of_the_agents_own_ends_a_run(
    redis_url: str, contract: dict[str, Any]
) -> None:
    """TOOL-21"""
    later, now = (call(("stop_here", {"how": how})) for how in ("later", "now"))
    result, messages, requests = await ran(redis_url, later, now, special_tools=(STOP,), **contract)
    assert (result.status, result.output) == (RunStatus.COMPLETED, "stopped: now")
    assert told(messages) == ['{"wait": true}', "accepted"]
    assert requests[0].tools[-1].name == "stop_here"


async def test_a_special_tool_can_end_a_run_with_data(redis_url: str) -> None:
    """TOOL-21"""
    result, _, _ = await ran(redis_url, call(("stop_here", {"how": "data"})), special_tools=(STOP,))
    assert (result.structured, result.output) == ({"steps": 1}, DEFAULT_TEXT)


async def test_beside_special_tools_alone_text_still_ends_a_run(redis_url: str) -> None:
    """TOOL-21"""
    result, _, _ = await ran(redis_url, say("done"), special_tools=(STOP,))
    assert (result.output, result.steps_used) == ("done", 1)


def refusal(result: AgentRunResult) -> str:
    """Return the refusal that explains a run's end, as every reader has it."""
    assert result.stop_reason is StopReason.STEPS_LIMIT
    assert result.last_error is not None
    text = result.last_error.message
    assert (result.last_error.type, result.last_error.code) == ("validation", "ANSWER_REFUSED")
    assert text in result.explain()
    assert text in str(result.debug())
    assert result.cause is not None
    assert result.cause.code == "ANSWER_REFUSED"
    assert result.outcome is not None
    check = result.outcome.get_evaluation_for("AnswerContractCheck")
    assert check is not None
    assert check.reason == text
    with pytest.raises(MaxStepsExceeded, match="answer refused"):
        result.raise_for_status()
    return text


WRONG = {"name": "Oslo", "people": "many"}


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (call(("structured_response", {"structured": WRONG})), "people: 'many' is not of type"),
        (
            call(("final_answer", {"answer": "Oslo", "structured": WRONG})),
            "people: 'many' is not of type",
        ),
        (call(("structured_response", {"wrong": 1})), "'structured' is a required property"),
        (
            call(("structured_response", {"structured": CITY}), ("look", {"what": "a"})),
            "must be the only call of its turn",
        ),
        (say("Oslo, I think"), "text in place of a call of structured_response"),
        (say(json.dumps(WRONG)), "people: 'many' is not of type"),
    ],
)
async def test_an_answer_that_the_contract_refuses_names_the_cause(
    redis_url: str, answer: Any, why: str
) -> None:
    """ANS-07, ANS-09: also where the last allowed step gave it; the step itself did not fail."""
    result, _, _ = await ran(redis_url, answer, output_type=City, max_steps=2)
    text = refusal(result)
    assert text.startswith("answer refused: ")
    assert why in text
    assert not result.steps[-1].errors
    assert result.output is None


async def test_text_in_place_of_the_final_answer_is_named_with_its_fix(redis_url: str) -> None:
    """ANS-11"""
    result, _, _ = await ran(redis_url, say("it is 42"), require_final_answer=True, max_steps=1)
    assert "leave require_final_answer out" in refusal(result)


async def test_in_native_mode_a_refused_message_names_the_cause(redis_url: str) -> None:
    """ANS-17"""
    result, _, _ = await ran(redis_url, say('{"name": "Oslo"}'), **NATIVE, max_steps=1)
    assert "'people' is a required property" in refusal(result)
    assert result.output is None


@pytest.mark.parametrize("mode", [{}, {"answer_mode": "native"}])
async def test_a_refused_answer_that_was_cut_or_filtered_says_so(
    redis_url: str, mode: dict[str, Any]
) -> None:
    """ANS-17"""
    cut = say('{"name": "Os', finish_reason=FinishReason.LENGTH)
    result, _, _ = await ran(redis_url, cut, output_type=City, max_steps=1, **mode)
    assert "cut at its limit of tokens: raise settings.max_tokens" in refusal(result)
    assert result.steps[0].finish_reason is FinishReason.LENGTH
    kept = say('{"name": "Os', finish_reason=FinishReason.CONTENT_FILTER)
    result, _, _ = await ran(redis_url, kept, output_type=City, max_steps=3, **mode)
    assert result.last_error is not None
    assert result.last_error.code == ModelErrorCode.CONTENT_FILTER
    assert result.steps[0].finish_reason is FinishReason.CONTENT_FILTER
    assert len(result.steps) == 1


async def test_the_timeline_and_the_events_of_a_step_have_its_refusal(redis_url: str) -> None:
    """ANS-09: the pages show a step with one as one with errors."""
    wrong = call(("structured_response", {"structured": WRONG}))
    async with opened_run(redis_url, wrong, tools=(look,), output_type=City, max_steps=1) as (
        desk,
        hands,
        run_id,
    ):
        await hands.finish(run_id)
        store = desk.opened
        seen = await store.timelines.read(run_id, 1, 9, content=True)
        events, _ = await desk.runs.events(run_id)
    (error,) = seen.steps[0].errors
    assert error.startswith("answer refused: people: 'many' is not of type 'integer'")
    (done,) = (one["payload"] for one in events if one["type"] == "agent.step.completed")
    assert (done["errors"], done["refused"]) == ([], error)


async def test_a_refusal_is_forgotten_when_a_later_answer_is_taken(redis_url: str) -> None:
    wrong = call(("structured_response", {"structured": WRONG}))
    result, _, _ = await ran(redis_url, wrong, DATA, output_type=City)
    assert (result.status, result.last_error) == (RunStatus.COMPLETED, None)


@pytest.mark.parametrize("text", [json.dumps(CITY), f"```json\n{json.dumps(CITY)}\n```"])
async def test_in_the_default_mode_a_whole_message_that_is_valid_data_is_the_answer(
    redis_url: str, text: str
) -> None:
    """ANS-09, ANS-11, CONT-33"""
    result, messages, _ = await ran(redis_url, say(text), output_type=City, max_steps=1)
    assert (result.status, result.structured, result.schema_name) == (
        RunStatus.COMPLETED,
        CITY,
        "City",
    )
    assert (result.output, len(messages)) == (text, 2)


async def test_data_in_a_message_is_corrected_by_place_in_the_default_mode(redis_url: str) -> None:
    """ANS-09"""
    result, messages, _ = await ran(redis_url, say(json.dumps(WRONG)), DATA, output_type=City)
    assert "people: 'many' is not of type 'integer'" in told(messages)[0]
    assert "Call structured_response" in told(messages)[0]
    assert result.structured == CITY


async def test_a_message_of_a_strategy_in_json_mode_is_never_taken_as_data(redis_url: str) -> None:
    """ANS-09: its object fits any schema that requires nothing."""
    thinks = say(json.dumps({"thought": "hm", "action": None, "done": False}))
    result, _, _ = await ran(
        redis_url, thinks, strategy="react", output_type={"type": "object"}, max_steps=1
    )
    assert result.stop_reason is StopReason.STEPS_LIMIT


@pytest.mark.parametrize("contract", [{"output_type": City}, {"require_final_answer": True}])
async def test_a_preamble_is_no_output_of_a_run_with_a_contract(
    redis_url: str, contract: dict[str, Any]
) -> None:
    asked = call(("look", {"what": "a"}), text="Let me look that up")
    result, _, _ = await ran(redis_url, asked, max_steps=1, **contract)
    assert (result.status, result.output) == (RunStatus.MAX_ITERATIONS_REACHED, None)
    assert result.steps[0].thought == "Let me look that up"


@pytest.mark.parametrize("mode", ["tool", "native"])
@pytest.mark.parametrize(
    ("output_type", "wrong", "value"),
    [
        (int, "many", 3),
        (list[City], [{"name": "Oslo"}], [CITY]),
        (Literal["yes", "no"], "maybe", "no"),
    ],
)
async def test_an_answer_may_be_of_a_type_that_is_no_object(
    redis_url: str, mode: str, output_type: Any, wrong: Any, value: Any
) -> None:
    """ANS-14"""
    answers = [{"value": wrong}, {"value": value}]
    says = (
        [say(json.dumps(one)) for one in answers]
        if mode == "native"
        else [call(("structured_response", {"structured": one})) for one in answers]
    )
    result, messages, _ = await ran(redis_url, *says, output_type=output_type, answer_mode=mode)
    assert (result.status, result.structured) == (RunStatus.COMPLETED, value)
    assert "value" in told(messages)[0]
    if output_type is not Literal["yes", "no"]:
        read: Any = result.structured_as(output_type)
        assert TypeAdapter(output_type).dump_python(read) == value
