"""What calls of the two answer tools mean, told through either sink."""

from typing import Any

import pytest
from pydantic import BaseModel
from support.runs.agent_records import START, a_state

from stepfleet.orchestrator import (
    AgentException,
    AgentState,
    ConfigurationError,
    Continue,
    ErrorInfo,
    ReturnAnswer,
    ReturnResult,
    SpecialTool,
    ToolCall,
)
from stepfleet.orchestrator.agents.answers import ErrorSink, MessagesSink, Outcome, RecordsSink
from stepfleet.orchestrator.agents.answers.definitions import final_answer, structured_response
from stepfleet.orchestrator.records.conversation.messages import result_text
from stepfleet.orchestrator.records.outcome import RunAnswer
from stepfleet.orchestrator.tools.schemas.handles import schema_of


class Point(BaseModel):
    x: int
    y: int


class Reports:
    """A sink that notes what is reported."""

    def __init__(self) -> None:
        self.errors: list[ErrorInfo] = []
        self.observations: list[Any] = []

    def report_error(self, call: ToolCall, error: ErrorInfo) -> None:
        self.errors.append(error)

    def report_observation(self, call: ToolCall, result: Any) -> None:
        self.observations.append(result)


POINT = schema_of(Point)
GOOD = {"x": 1, "y": 2}
PENDING = a_state(1, answer=RunAnswer(text="so far"))
Case = tuple[SpecialTool, dict[str, Any], AgentState, Outcome, str | None]
FINAL, FINAL_DATA = final_answer(None), final_answer(POINT)
DATA, NO_DATA = structured_response(POINT), structured_response(None)

CASES: dict[str, Case] = {
    "text ends": (FINAL, {"answer": "42"}, a_state(), ReturnAnswer("42"), None),
    "null for what is left out": (
        FINAL,
        {"answer": "42", "structured": None, "meta": None},
        a_state(),
        ReturnAnswer("42"),
        None,
    ),
    "data without a schema is kept": (
        FINAL,
        {"answer": "42", "structured": {"n": 42}, "meta": {"source": "book"}},
        a_state(),
        ReturnResult({"n": 42}, "42"),
        None,
    ),
    "data of the schema ends": (
        FINAL_DATA,
        {"answer": "here", "structured": GOOD},
        a_state(),
        ReturnResult(GOOD, "here", "Point"),
        None,
    ),
    "data is awaited": (FINAL_DATA, {"answer": "here"}, a_state(), Continue("here"), None),
    "wrong data": (
        FINAL_DATA,
        {"answer": "here", "structured": {"x": "1", "y": 2}},
        a_state(),
        Continue(),
        "x: '1' is not of type 'integer'",
    ),
    "blank": (FINAL, {"answer": " \n"}, a_state(), Continue(), "answer: is blank"),
    "no text": (FINAL, {}, a_state(), Continue(), "<root>: 'answer' is a required property"),
    "not text": (FINAL, {"answer": 42}, a_state(), Continue(), "answer: 42 is not of type"),
    "unknown": (FINAL, {"answer": "a", "data": {}}, a_state(), Continue(), "('data')"),
    "twice": (FINAL_DATA, {"answer": "again"}, PENDING, Continue(), "was given already"),
    "data ends": (DATA, {"structured": GOOD}, a_state(), ReturnResult(GOOD, None, "Point"), None),
    "data after text": (
        DATA,
        {"structured": GOOD},
        PENDING,
        ReturnResult(GOOD, None, "Point"),
        None,
    ),
    "invalid data": (
        DATA,
        {"structured": {"x": 1}},
        a_state(),
        Continue(),
        "structured_response: <root>: 'y' is a required property",
    ),
    "no object": (DATA, {"structured": [1]}, a_state(), Continue(), "must be a JSON object"),
    "unwrapped": (DATA, GOOD, a_state(), Continue(), "'structured' is a required property"),
    "no schema": (NO_DATA, {"structured": {}}, a_state(), Continue(), "no schema"),
    "too large": (
        DATA,
        {"structured": {"x": 1, "y": "z" * 300_000}},
        a_state(),
        Continue(),
        "larger than the limit of 262144 bytes",
    ),
}


def asked(special: SpecialTool, arguments: dict[str, Any]) -> ToolCall:
    return ToolCall(id="c1", name=special.name, arguments=arguments)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_call_means_one_of_three_things_and_what_is_wrong_is_reported(case: Case) -> None:
    """ANS-12, ANS-13, ANS-07, ANS-08, ANS-09, ANS-10"""
    special, arguments, state, outcome, error = case
    sink = Reports()
    assert special.take(asked(special, arguments), state, sink) == outcome
    if error is None:
        assert not sink.errors
    else:
        assert error in sink.errors[0].message


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_both_sinks_come_to_the_same(case: Case) -> None:
    """ANS-12"""
    special, arguments, state, outcome, _ = case
    records, messages = RecordsSink(START), MessagesSink()
    sinks: tuple[ErrorSink, ...] = (records, messages)
    outcomes = [special.take(asked(special, arguments), state, sink) for sink in sinks]
    assert outcomes == [outcome, outcome]
    texts = [result_text(record) for record in records.records.values()]
    assert texts == [message.text for message in messages.messages]


def test_a_wrong_answer_is_reported_as_an_error_that_the_model_can_mend() -> None:
    """ANS-07"""
    sink = RecordsSink(START)
    FINAL.take(asked(FINAL, {"answer": ""}), a_state(), sink)
    record = sink.records["c1"]
    assert record.error is not None
    assert (record.error.code, record.error.retryable) == ("VALIDATION_ERROR", True)
    assert (record.error.tool_name, record.error.call_id) == ("final_answer", "c1")
    assert result_text(record).startswith('Error: {"error": {"code": "VALIDATION_ERROR"')


def test_a_call_that_could_not_be_parsed_is_answered_so() -> None:
    """ANS-07"""
    sink = Reports()
    broken = ToolCall(id="c1", name="final_answer", error="not valid JSON: at character 3")
    assert FINAL.take(broken, a_state(), sink) == Continue()
    assert (sink.errors[0].code, sink.errors[0].message) == (
        "INVALID_FUNCTION_CALL",
        "not valid JSON: at character 3",
    )


def raises(call: ToolCall, state: AgentState, sink: ErrorSink) -> Outcome:
    raise ValueError("no idea")


def raises_ours(call: ToolCall, state: AgentState, sink: ErrorSink) -> Outcome:
    raise AgentException("our own")


def returns_text(call: ToolCall, state: AgentState, sink: ErrorSink) -> Any:
    return "done"


@pytest.mark.parametrize(
    ("handler", "told"),
    [
        (raises, "ValueError: no idea"),
        (raises_ours, "our own"),
        (returns_text, "its handler returned a str"),
    ],
)
def test_trouble_in_a_handler_is_an_error_of_the_call(handler: Any, told: str) -> None:
    """TOOL-21"""
    special = SpecialTool(name="stop_here", description="Stop.", handler=handler)
    sink = Reports()
    assert special.take(asked(special, {}), a_state(), sink) == Continue()
    assert told in sink.errors[0].message


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"name": "no spaces"}, "name must be"),
        ({"handler": "stop"}, "handler must be a function"),
        ({"parameters": {"type": "array"}}, "must describe an object"),
    ],
)
def test_a_special_tool_that_cannot_work_is_refused(fields: dict[str, Any], match: str) -> None:
    """TOOL-21"""
    given = {"name": "stop_here", "description": "Stop.", "handler": returns_text, **fields}
    with pytest.raises(ConfigurationError, match=match):
        SpecialTool(**given)
