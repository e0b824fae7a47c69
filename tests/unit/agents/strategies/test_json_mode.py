import json
from typing import Any

import pytest

from stepfleet.orchestrator import (
    FinishReason,
    LLMResponse,
    Message,
    ModelRequest,
    ToolCall,
    ToolSpec,
)
from stepfleet.orchestrator.agents.strategies.json_mode import (
    MOST_CALLS,
    as_text,
    calls_of,
    in_json_mode,
    parsed_object,
    tools_paragraph,
    with_calls,
)
from stepfleet.orchestrator.records.responses import OutputFormat
from stepfleet.orchestrator.tools.schemas.bounded_json import BoundsError

LOOK = {"what": "a"}


@pytest.mark.parametrize(
    "text",
    ['{"a": 1}', '  {"a": 1}\n', '```json\n{"a": 1}\n```', 'Here it is: {"a": 1} - done'],
)
def test_an_object_is_found_bare_fenced_or_in_prose(text: str) -> None:
    """STRAT-07"""
    assert parsed_object(text) == {"a": 1}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no JSON object"),
        ("42", "no JSON object"),
        ('{"a": ', "not valid JSON"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ('{"a": ' + "[" * 10_000 + "]" * 10_000 + "}", "nested deeper"),
        ('{"a": "' + "x" * 2_000_000 + '"}', "longer than the limit"),
        ('{"a": "\\u0000"}', "NUL"),
    ],
)
def test_what_is_no_object_says_why(text: str, why: str) -> None:
    """STRAT-07"""
    with pytest.raises(BoundsError, match=why):
        parsed_object(text)


@pytest.mark.parametrize(
    "parsed",
    [
        {"action": {"tool": "look", "arguments": LOOK}},
        {"action": {"name": "look", "arguments": LOOK}},
        {"action": {"name": "look", "input": LOOK}},
        {"action": {"tool": "look", "args": json.dumps(LOOK)}},
        {"action": "look", "action_input": LOOK},
        {"actions": [{"tool": "look", "arguments": LOOK}]},
        {"action": [{"tool_name": "look", "parameters": LOOK}]},
    ],
)
def test_an_action_is_read_in_each_of_its_spellings(parsed: dict[str, Any]) -> None:
    """STRAT-07"""
    assert calls_of(parsed, 3) == (ToolCall(id="action_3_0", name="look", arguments=LOOK),)


@pytest.mark.parametrize("parsed", [{}, {"action": None}, {"action": ""}, {"actions": []}])
def test_no_action_is_no_call(parsed: dict[str, Any]) -> None:
    assert calls_of(parsed, 1) == ()


@pytest.mark.parametrize(
    ("action", "error"),
    [
        (7, "names no tool"),
        ({"arguments": {}}, "names no tool"),
        ({"tool": "x", "args": 1}, "JSON"),
    ],
)
def test_a_malformed_action_is_a_call_with_its_error(action: Any, error: str) -> None:
    """STRAT-07: it is answered with the error and never run."""
    (call,) = calls_of({"action": action}, 1)
    assert call.error is not None
    assert error in call.error


def test_endless_actions_are_bounded() -> None:
    assert len(calls_of({"actions": ["look"] * 5000}, 1)) == MOST_CALLS


def test_an_answer_gets_its_calls_once() -> None:
    """STRAT-07: reading it again, after a crash, changes nothing."""
    said = LLMResponse(content='{"action": {"tool": "look", "arguments": {"what": "a"}}}')
    read = with_calls(said, 2)
    assert read.tool_calls == (ToolCall(id="action_2_0", name="look", arguments=LOOK),)
    assert read.finish_reason is FinishReason.TOOL_CALLS
    assert read.content == said.content
    assert with_calls(read, 2) == read


def test_calls_in_the_text_of_a_refused_answer_are_not_made() -> None:
    said = LLMResponse(content='{"action": "look"}', finish_reason=FinishReason.CONTENT_FILTER)
    assert with_calls(said, 2) is said


@pytest.mark.parametrize("content", ["prose", '{"done": true}'])
def test_an_answer_without_an_action_stays_as_it_is(content: str) -> None:
    said = LLMResponse(content=content)
    assert with_calls(said, 2) is said


CALLS = (ToolCall(id="1", name="look", arguments=LOOK), ToolCall(id="2", name="add"))
TALK = (
    Message.system("s"),
    Message.user("q"),
    Message.assistant('{"action": "x"}', CALLS),
    Message.tool(CALLS[0], "seen"),
    Message.tool(CALLS[1], "3"),
    Message.assistant("", CALLS[:1]),
    Message.tool(CALLS[0], "again"),
    Message.assistant("done"),
)


def test_a_conversation_is_sent_without_native_calls() -> None:
    """STRAT-07: results of one turn are one message, and nothing is lost."""
    assert tuple(as_text(TALK)) == (
        *TALK[:2],
        Message.assistant('{"action": "x"}'),
        Message.user("Observation (look): seen\n\nObservation (add): 3"),
        Message.assistant('{"action": {"tool": "look", "arguments": {"what": "a"}}}'),
        Message.user("Observation (look): again"),
        TALK[-1],
    )


def test_results_that_are_blocks_stay_blocks() -> None:
    image = {"image": {"format": "png", "source": {"bytes": ""}}}
    result = TALK[3].model_copy(update={"content": [image]})
    told = tuple(as_text((*TALK[:3], result, TALK[4])))
    assert told[-1].content == [
        {"text": "Observation (look): "},
        image,
        {"text": "Observation (add): "},
        {"text": "3"},
    ]


def test_a_request_in_json_mode_offers_no_native_tools() -> None:
    """STRAT-07"""
    tools = (ToolSpec(name="look", description="Look.", parameters={"type": "object"}),)
    request = ModelRequest(model="m", messages=TALK, tools=tools, parallel_tool_calls=False)
    asked = in_json_mode(request, TALK[:2])
    assert (asked.tools, asked.tool_choice, asked.parallel_tool_calls) == ((), "auto", None)
    assert (asked.output, asked.messages) == (OutputFormat(), TALK[:2])
    assert tools_paragraph(tools) == (
        "The tools that an action can name:\n"
        '- look: Look. Arguments (JSON Schema): {"type":"object"}'
    )
    assert tools_paragraph(()) == ""


def test_a_call_of_a_model_that_only_thought_is_text_too() -> None:
    thought = {"reasoning": {"provider": "anthropic", "at": 0, "data": {"thinking": "Hm."}}}
    call = ToolCall(id="c", name="look", arguments={})
    (message,) = as_text([Message.assistant([thought], (call,))])
    assert '"tool": "look"' in message.text
