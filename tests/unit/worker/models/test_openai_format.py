import json
from pathlib import Path
from typing import Any

import pytest

from stepfleet.orchestrator import Message, ModelRequest, ModelSettings, Role, ToolCall, ToolSpec
from stepfleet.worker.models.bodies import encode
from stepfleet.worker.models.openai.request import (
    request_body,
    tool_choice,
    wire_messages,
)

GOLDEN = Path(__file__).parent / "golden"
SEARCH = ToolSpec(
    name="search",
    description="Search.",
    parameters={"type": "object", "properties": {"query": {"type": "string"}}},
)


def wire(*messages: Message, official: bool = False) -> list[dict[str, Any]]:
    return wire_messages(messages, official=official)


def body(*, official: bool = False, **fields: Any) -> dict[str, Any]:
    request = ModelRequest(model="m", messages=(Message.user("hi"),), **fields)
    return request_body(request, official=official)


def two_tool_conversation() -> tuple[Message, ...]:
    weather = ToolCall(id="call_1", name="weather", arguments={"city": "Zürich", "days": 2})
    clock = ToolCall(id="call_2", name="clock", arguments={})
    return (
        Message.system("You are brief."),
        Message.user("Weather and time?"),
        Message.assistant("", (weather, clock)).model_copy(update={"metadata": {"step": 1}}),
        Message.tool(weather, '{"sky":"clear"}').model_copy(update={"metadata": {"result": {}}}),
        Message.tool(clock, "12:00"),
        Message.assistant("Clear, and it is noon."),
    )


def test_a_conversation_with_two_tools_becomes_the_golden_file() -> None:
    """MSG-09: arguments as JSON text, content null, a role-tool message per result."""
    golden = json.loads((GOLDEN / "two_tools.json").read_text(encoding="utf-8"))
    assert wire(*two_tool_conversation()) == golden


def test_metadata_is_never_sent() -> None:
    """MSG-17: neither as text nor as a field."""
    call = ToolCall(id="c", name="t", arguments={})
    secret = {"tool_calls": ["LEAK"], "tool_call_id": "LEAK", "tool_name": "LEAK", "result": "LEAK"}
    messages = (
        Message.user("x"),
        Message.assistant("y", (call,)),
        Message.tool(call, "z"),
    )
    marked = [message.model_copy(update={"metadata": secret}) for message in messages]
    assert "LEAK" not in json.dumps(wire(*marked))


def test_text_beside_tool_calls_is_sent_with_them() -> None:
    """MSG-14: natural language beside a call is kept."""
    sent = wire(Message.assistant("I'll look.", (ToolCall(id="c", name="t"),)))[0]
    assert sent["content"] == "I'll look."
    assert len(sent["tool_calls"]) == 1


def test_an_assistant_without_text_and_calls_has_empty_text_and_not_null() -> None:
    assert wire(Message.assistant("")) == [{"role": "assistant", "content": ""}]


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ("auto", "auto"),
        ("any", "required"),
        ("none", "none"),
        ("search", {"type": "function", "function": {"name": "search"}}),
    ],
)
def test_tool_choice_translates(choice: str, sent: Any) -> None:
    """MSG-10: auto, any, none, a named tool."""
    assert tool_choice(choice) == sent
    assert body(tools=(SEARCH,), tool_choice=choice)["tool_choice"] == sent


def test_tools_and_choice_are_sent_when_there_are_tools() -> None:
    """LLM-10: with tools."""
    sent = body(tools=(SEARCH,), parallel_tool_calls=False)
    function = {"name": "search", "description": "Search.", "parameters": SEARCH.parameters}
    assert sent["tools"] == [{"type": "function", "function": function}]
    assert sent["tool_choice"] == "auto"
    assert sent["parallel_tool_calls"] is False


def test_tools_and_choice_are_omitted_without_tools() -> None:
    """LLM-10: without tools."""
    sent = body(parallel_tool_calls=True, tool_choice="any")
    assert not {"tools", "tool_choice", "parallel_tool_calls"} & sent.keys()


def test_a_tool_without_parameters_gets_an_empty_schema() -> None:
    sent = body(tools=(ToolSpec(name="now"),))["tools"][0]["function"]["parameters"]
    assert sent == {"type": "object", "properties": {}}


def test_settings_that_are_unset_are_not_sent() -> None:
    assert set(body()) == {"model", "messages"}


def test_every_setting_has_its_field() -> None:
    """LLM-19: the output-token limit among them."""
    settings = ModelSettings(
        temperature=0.0, top_p=0.5, max_tokens=7, stop=("END",), seed=3, stream=True
    )
    sent = body(settings=settings)
    del sent["messages"]
    assert sent == {
        "model": "m",
        "temperature": 0.0,
        "top_p": 0.5,
        "max_tokens": 7,
        "stop": ["END"],
        "seed": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_openai_itself_gets_the_newer_name_of_the_output_limit() -> None:
    sent = body(settings=ModelSettings(max_tokens=7), official=True)
    assert sent["max_completion_tokens"] == 7
    assert "max_tokens" not in sent


def test_extra_body_overrules_everything() -> None:
    sent = body(settings=ModelSettings(seed=1, extra_body={"seed": 2, "top_k": 5}))
    assert (sent["seed"], sent["top_k"]) == (2, 5)


def test_the_developer_role_is_sent_to_openai_alone() -> None:
    developer = Message(role=Role.DEVELOPER, content="rules")
    assert wire(developer, official=True)[0]["role"] == "developer"
    assert wire(developer, official=False)[0]["role"] == "system"


def test_text_blocks_become_plain_text() -> None:
    assert wire(Message.user([{"text": "a"}, {"text": "b"}]))[0]["content"] == "ab"


def test_images_become_parts() -> None:
    sent = wire(
        Message.user(
            [
                {"text": "what is this?"},
                {"image": {"format": "jpeg", "source": {"bytes": "QUJD"}}},
                {"image": {"source": {"url": "https://example.com/a.png"}}},
            ]
        )
    )
    assert sent[0]["content"] == [
        {"type": "text", "text": "what is this?"},
        {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,QUJD"}},
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
    ]


def test_documents_become_files() -> None:
    block = {"document": {"name": "report.pdf", "format": "pdf", "source": {"bytes": "QUJD"}}}
    assert wire(Message.user([block]))[0]["content"] == [
        {
            "type": "file",
            "file": {"filename": "report.pdf", "file_data": "data:application/pdf;base64,QUJD"},
        }
    ]


def test_blocks_of_an_unknown_kind_pass_unchanged() -> None:
    """MSG-06: further block kinds pass through unharmed."""
    blocks: list[dict[str, Any]] = [
        {"type": "input_audio", "input_audio": {"data": "x"}},
        {"hologram": {"a": 1}},
    ]
    assert wire(Message.user(list(blocks)))[0]["content"] == blocks


def test_tool_blocks_become_calls_and_tool_messages() -> None:
    asked = {"toolUse": {"toolUseId": "u1", "name": "t", "input": {"a": 1}}}
    answered = {"toolResult": {"toolUseId": "u1", "content": [{"json": {"b": 2}}]}}
    sent = wire(
        Message(role=Role.ASSISTANT, content=[{"text": "ok"}, asked]), Message.user([answered])
    )
    assert sent[0]["tool_calls"][0]["function"] == {"name": "t", "arguments": '{"a":1}'}
    assert sent[1:] == [{"role": "tool", "tool_call_id": "u1", "content": '{"b": 2}'}]


def test_a_tool_name_that_services_refuse_is_made_safe() -> None:
    sent = wire(Message.assistant("", (ToolCall(id="c", name="rm -rf/", error="no such"),)))
    assert sent[0]["tool_calls"][0]["function"]["name"] == "rm_-rf_"


def test_a_call_without_a_name_still_gets_one() -> None:
    sent = wire(Message.assistant("", (ToolCall(id="c", name="", error="no name"),)))
    assert sent[0]["tool_calls"][0]["function"]["name"] == "unnamed_tool"


@pytest.mark.parametrize("value", ["\ud800 alone", 2**70])
def test_what_the_fast_encoder_refuses_is_still_encoded(value: Any) -> None:
    assert json.loads(encode({"value": value})) == {"value": value}
