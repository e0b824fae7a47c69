"""What a line of a batch file may say, and what is said of one that says something else."""

import json
from typing import Any

import pytest

from stepfleet.orchestrator import ConfigurationError, Message, Role
from stepfleet.orchestrator.batches.files.lines import (
    INPUT_LIMIT,
    METADATA_LIMIT,
    BatchLine,
    parse_line,
    read_object,
)
from stepfleet.orchestrator.batches.files.openai_format import parse_openai_line


def parsed(**fields: Any) -> BatchLine:
    return parse_line(json.loads(json.dumps(fields)))


def test_a_line_with_text_becomes_one_user_message() -> None:
    line = parsed(
        id="q1",
        input="What is 2 + 2?",
        agent="solver",
        metadata={"topic": "sums"},
        overrides={"max_steps": 3},
    )
    assert line.line_id == "q1"
    assert line.messages == (Message.user("What is 2 + 2?"),)
    assert line.agent == "solver"
    assert line.metadata == {"topic": "sums"}
    assert line.overrides == {"max_steps": 3}


def test_a_line_needs_only_its_input_and_takes_numbers_as_ids() -> None:
    assert parsed(input="x").line_id is None
    assert parsed(input="x", id=7).line_id == "7"


def test_a_conversation_keeps_its_roles_and_tool_calls_in_either_spelling() -> None:
    ours = {"id": "c1", "name": "look", "arguments": {"a": 1}}
    theirs = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    for call in (ours, theirs):
        line = parsed(
            input=[
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
                {"role": "tool", "content": "1", "tool_call_id": "c1"},
                {"role": "user", "content": [{"type": "text", "text": "and now?"}]},
            ]
        )
        roles = [message.role for message in line.messages]
        assert roles == [Role.USER, Role.ASSISTANT, Role.TOOL, Role.USER]
        assert line.messages[1].tool_calls[0].arguments == {"a": 1}
        assert line.messages[1].content == ""


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown field": ({"input": "x", "question": "y"}, "'question' is not known; a line has"),
    "misspelt field": (
        {"input": "x", "afetr": ["a"]},
        "'afetr' is not known; did you mean 'after'? A line has",
    ),
    "order of an object": ({"input": "x", "after": {"a": 1}}, "'after' is an object; write a list"),
    "order of a number": (
        {"input": "x", "after": 1.5},
        'a list of ids of lines above, as ["a"',
    ),
    "place in data": (
        {"input": {"x": [{"y": "it: {a}"}]}, "after": ["a"]},
        "'input' is a dict and names {a}: only a text has places",
    ),
    "no input": ({"id": "1"}, "'input' is missing"),
    "empty input": ({"input": "  "}, "'input' is empty"),
    "null input": ({"input": None}, "'input' is null"),
    "number as input": ({"input": 7}, "'input' is a number"),
    "no messages": ({"input": []}, "'input' is an empty list"),
    "message no object": ({"input": ["hi"]}, "'input.0' is text"),
    "unknown role": ({"input": [{"role": "boss", "content": "x"}]}, "'input.0': field 'role'"),
    "no role": ({"input": [{"content": "x"}]}, "'role' is missing"),
    "bad call": (
        {"input": [{"role": "assistant", "tool_calls": [{"id": "1", "name": ""}]}]},
        "'input.0.tool_calls'",
    ),
    "call without id": (
        {"input": [{"role": "assistant", "tool_calls": [{"name": "look"}]}]},
        "has no id",
    ),
    "agent no text": ({"input": "x", "agent": 5}, "'agent' is a number"),
    "agent empty": ({"input": "x", "agent": ""}, "'agent' is empty text"),
    "id a list": ({"input": "x", "id": []}, "'id' is an empty list"),
    "id true": ({"input": "x", "id": True}, "'id' is true or false"),
    "id empty": ({"input": "x", "id": ""}, "'id' is empty text"),
    "id too long": ({"input": "x", "id": "i" * 513}, "'id' is longer than 512"),
    "metadata text": ({"input": "x", "metadata": "m"}, "'metadata' is text"),
    "metadata large": ({"input": "x", "metadata": {"m": "m" * METADATA_LIMIT}}, "'metadata' has"),
    "overrides list": ({"input": "x", "overrides": [1]}, "'overrides' is a list"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_reported_by_its_field(name: str) -> None:
    data, said = BAD[name]
    with pytest.raises(ConfigurationError, match="field") as caught:
        parse_line(data)
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"{oops", "is not valid JSON"),
        (b'"text"', "is text, not an object"),
        (b"[1]", "is a list, not an object"),
        (b"\xff\xfe{}", "is not valid JSON"),
        (b'{"input": "\\ud800"}', "is not valid JSON"),
        (b'{"input": NaN}', "is not valid JSON"),
        (b"[" * 5000, "is not valid JSON"),
    ],
)
def test_a_line_that_is_no_object_is_reported_with_its_column(raw: bytes, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_object(raw)
    assert said in caught.value.message


def test_inputs_up_to_one_mebibyte_are_taken_and_longer_ones_refused_with_the_limit() -> None:
    assert parsed(input="x" * INPUT_LIMIT).messages
    with pytest.raises(ConfigurationError, match=r"1,048,577 bytes; the limit is 1,048,576"):
        parsed(input="x" * (INPUT_LIMIT + 1))
    with pytest.raises(ConfigurationError, match="the limit is 1,048,576"):
        parsed(input="é" * (INPUT_LIMIT // 2 + 1))
    with pytest.raises(ConfigurationError, match="the limit is 1,048,576"):
        parsed(input=[{"role": "user", "content": "x" * INPUT_LIMIT}])


def request(**changes: Any) -> dict[str, Any]:
    body = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "hi"}]}
    body |= changes.pop("body", {})
    return {
        "custom_id": "r1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": body,
        **changes,
    }


def test_an_openai_request_becomes_messages_settings_and_further_fields() -> None:
    line = parse_openai_line(
        request(
            body={
                "temperature": 0,
                "max_completion_tokens": 50,
                "stop": "END",
                "seed": 3,
                "response_format": {"type": "json_object"},
                "stream": False,
            }
        )
    )
    assert line.line_id == "r1"
    assert line.model == "gpt-4o-mini"
    assert line.messages == (Message.user("hi"),)
    settings = {"temperature": 0, "max_tokens": 50, "stop": ["END"], "seed": 3}
    assert line.overrides == {"settings": settings}
    assert line.extra_body == {"response_format": {"type": "json_object"}}


def test_an_openai_request_names_tools_and_the_choice_among_them() -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    line = parse_openai_line(
        request(body={"tools": [tool], "tool_choice": tool, "parallel_tool_calls": False})
    )
    assert line.tools == ("look",)
    assert line.overrides == {"tool_choice": "look", "parallel_tool_calls": False}
    any_of_them = parse_openai_line(request(body={"tools": [tool], "tool_choice": "required"}))
    assert any_of_them.overrides == {"tool_choice": "any"}


BAD_REQUESTS = {
    "no id": (request(custom_id=None), "'custom_id' is missing"),
    "method": (request(method="GET"), "'method' is 'GET'"),
    "url": (request(url="/v1/embeddings"), "'url' is '/v1/embeddings'; only"),
    "no body": (request(body={}) | {"body": None}, "'body' is missing"),
    "unknown": (request(input="x"), "'input' is not known"),
    "no model": (request(body={"model": ""}), "'body.model' is missing"),
    "no messages": (request(body={"messages": None}), "'body.messages' is missing"),
    "empty messages": (request(body={"messages": []}), "'body.messages' is an empty list"),
    "stream": (request(body={"stream": True}), "'body.stream' is true"),
    "many answers": (request(body={"n": 2}), "'body.n' must be 1"),
    "tools": (request(body={"tools": [{"type": "web_search"}]}), "'body.tools': each tool"),
    "tool choice": (
        request(body={"tools": [{"function": {"name": "a"}}], "tool_choice": 1}),
        "'body.tool_choice' is 1",
    ),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_openai_request_is_reported_by_its_field(name: str) -> None:
    data, said = BAD_REQUESTS[name]
    with pytest.raises(ConfigurationError) as caught:
        parse_openai_line(data)
    assert said in caught.value.message
