"""Blocks on each provider: where they stand, by the types of the official SDKs."""

from datetime import UTC, datetime
from functools import cache
from typing import Any

import pytest
from pydantic import TypeAdapter
from support import vendors

from stepfleet.orchestrator import (
    Message,
    ModelRequest,
    Role,
    ToolCall,
    ToolCallRecord,
    ToolSpec,
    supports,
    tool,
)
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.conversation.messages import media_messages
from stepfleet.worker.models.anthropic import request_body as anthropic_body
from stepfleet.worker.models.blocks import fitted
from stepfleet.worker.models.google import request_body as google_body
from stepfleet.worker.models.openai.request import request_body as chat_body
from stepfleet.worker.models.responses import request_body as responses_body

DOT = "iVBORw0KGgo="
PICTURE = {"image": {"format": "png", "source": {"bytes": DOT}}}
SHOWN = {"image": {"source": {"url": "https://x/a.png"}, "detail": "low"}}
PAPER = {"document": {"format": "pdf", "name": "a.pdf", "source": {"bytes": "JVBERi0="}}}
NOTES = {"document": {"format": "md", "name": "notes", "source": {"text": "Straße"}}}
AUDIO = {"audio": {"format": "wav", "source": {"bytes": "UklGRg=="}}}
CALLS = (ToolCall(id="c1", name="look"), ToolCall(id="c2", name="look"))
MODELS = {
    "openai": "openai:gpt-x",
    "openai-responses": "openai-responses:gpt-x",
    "anthropic": "anthropic:claude-x",
    "google": "google:gemini-3-pro",
    "old": "google:gemini-2.5-pro",
}


@cache
def turns(provider: str) -> TypeAdapter[Any]:
    """Return what an SDK takes as a conversation."""
    match provider:
        case "openai":
            return TypeAdapter(list[vendors.openai.types.chat.ChatCompletionMessageParam])
        case "openai-responses":
            return TypeAdapter(list[vendors.openai.types.responses.ResponseInputItemParam])
        case "anthropic":
            return TypeAdapter(list[vendors.anthropic.types.MessageParam])
        case _:
            return TypeAdapter(list[vendors.genai.types.Content])


def sent(provider: str, *messages: Message) -> Any:
    """Return what a request has of the messages, held to the SDK's types."""
    model = MODELS[provider]
    fit = fitted(messages, supports(model))
    request = ModelRequest(model=model.partition(":")[2], messages=fit)
    match provider:
        case "openai":
            found = chat_body(request, official=True)["messages"]
        case "openai-responses":
            found = responses_body(request)["input"]
        case "anthropic":
            found = anthropic_body(request)["messages"]
        case _:
            found = google_body(request)["contents"]
    turns(provider).validate_python(found)
    return found


def shown(record: Any) -> tuple[Message, ...]:
    """Return a turn with two results, of which the second shows something."""
    at = datetime(2026, 1, 2, tzinfo=UTC)
    first, second = (
        ToolCallRecord(tool_name="look", call_id=one.id, timestamp=at, media=media)
        for one, media in zip(CALLS, ((), record), strict=True)
    )
    results = (Message.tool(CALLS[0], "one"), Message.tool(CALLS[1], "two"))
    return (
        Message.user("hi"),
        Message.assistant("", CALLS),
        *results,
        *media_messages((first, second)),
    )


@pytest.mark.parametrize("provider", MODELS)
def test_every_kind_is_sent_or_named(provider: str) -> None:
    found = str(sent(provider, Message.user([PICTURE, SHOWN, PAPER, NOTES, AUDIO])))
    for part in (DOT, "https://x/a.png", "JVBERi0=", "Straße"):
        assert part in found
    left_out = "[audio (audio/wav, base64 data) left out: it takes document, image]"
    assert ("UklGRg==" in found) == (provider in ("openai", "google", "old"))
    assert (left_out in found) == (provider in ("openai-responses", "anthropic"))


def test_forms_of_audio_text_and_files() -> None:
    chat = sent(
        "openai", Message.user([SHOWN, AUDIO, NOTES, {"document": {"source": {"file_id": "f"}}}])
    )
    assert chat[0]["content"] == [
        {"type": "image_url", "image_url": {"url": "https://x/a.png", "detail": "low"}},
        {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
        {"type": "text", "text": "notes:\n\nStraße"},
        {"type": "file", "file": {"file_id": "f"}},
    ]
    claude = sent("anthropic", Message.user([NOTES, {"image": {"source": {"file_id": "f"}}}]))
    assert [part["source"]["type"] for part in claude[0]["content"][:2]] == ["text", "file"]
    gemini = sent("google", Message.user([AUDIO]))
    assert gemini[0]["parts"] == [{"inlineData": {"mimeType": "audio/wav", "data": "UklGRg=="}}]


@pytest.mark.parametrize("provider", MODELS)
def test_media_of_a_result_stand_where_the_provider_has_them(provider: str) -> None:
    found = sent(provider, *shown((PICTURE,)))
    last = found[-1]
    match provider:
        case "anthropic":
            assert [block["type"] for block in last["content"]] == ["tool_result", "tool_result"]
            assert [one["type"] for one in last["content"][1]["content"]] == ["text", "image"]
        case "openai-responses":
            assert last["call_id"] == "c2"
            assert [one["type"] for one in last["output"]] == ["input_text", "input_image"]
        case "google":
            assert list(last["parts"][1]["functionResponse"]["parts"][0]) == ["inlineData"]
            assert len(last["parts"]) == 2
        case "openai":
            assert (last["role"], last["content"][1]["type"]) == ("user", "image_url")
            assert found[-2] == {"role": "tool", "tool_call_id": "c2", "content": "two"}
        case "old":
            assert [next(iter(part)) for part in last["parts"]] == [
                "functionResponse", "functionResponse", "text", "inlineData",
            ]  # fmt: skip
    assert ("Shown by tool look (call c2):" in str(found)) == (provider in ("openai", "old"))


def test_an_image_at_an_address_follows_where_results_nest_only_data() -> None:
    parts = sent("google", *shown((SHOWN,)))[-1]["parts"]
    assert [next(iter(part)) for part in parts[2:]] == ["text", "fileData"]


@pytest.mark.parametrize("provider", ["openai", "anthropic", "old"])
def test_a_result_that_was_given_with_an_image_is_taken(provider: str) -> None:
    result = {"toolResult": {"toolUseId": "c1", "content": [{"text": "one"}, PICTURE]}}
    call = Message.assistant("", CALLS[:1])
    for given in (
        Message.user([result, {"text": "And?"}]),
        Message(role=Role.TOOL, tool_call_id="c1", name="look", content=[{"text": "one"}, PICTURE]),
    ):
        found = sent(provider, Message.user("hi"), call, given)
        assert DOT in str(found)
        if provider == "openai":
            assert found[2] == {"role": "tool", "tool_call_id": "c1", "content": "one"}
            assert DOT in str(found[3])


def test_a_broken_block_of_an_older_run_is_named_and_text_costs_nothing() -> None:
    broken: dict[str, Any] = {"image": {"source": {}}}
    assert "[left out: image needs a source" in str(sent("openai", Message.user([broken])))
    plain = (Message.user("hi"), Message.assistant("there"))
    assert fitted(plain, supports("openai:x")) is plain


CLOSED = {
    "type": "object",
    "properties": {"at": {"type": "string"}},
    "required": ["at"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("asked", [None, True, False])
def test_strict_mode_is_sent_only_for_schemas_that_it_takes(asked: bool | None) -> None:
    tools = (
        ToolSpec(name="a", parameters=CLOSED, strict=asked),
        ToolSpec(name="b", parameters={**CLOSED, "required": []}, strict=asked),
    )
    request = ModelRequest(model="m", messages=(Message.user("hi"),), tools=tools)
    chat = chat_body(request, official=True)["tools"]
    claude = anthropic_body(request)["tools"]
    TypeAdapter(list[vendors.openai.types.chat.ChatCompletionToolParam]).validate_python(chat)
    TypeAdapter(list[vendors.anthropic.types.ToolParam]).validate_python(claude)
    unless_off = None if asked is False else True
    assert [one["function"].get("strict") for one in chat] == [unless_off, None]
    answered = [one["strict"] for one in responses_body(request)["tools"]]
    assert answered == [asked is not False, False]
    assert [one.get("strict") for one in claude] == [asked or None, None]
    others = chat_body(request, official=False)["tools"]
    assert [one["function"].get("strict") for one in others] == [asked or None, None]


def test_a_tool_that_asks_for_strict_mode_has_a_schema_that_it_takes() -> None:
    @tool(strict=True)
    def look(at: str, near: int | None) -> str:
        """Look."""
        return f"{at}{near}"

    assert look.spec.strict is True
    with pytest.raises(
        ConfigurationError, match="tool 'far': strict=True, and strict modes do not take its schema"
    ):

        @tool(strict=True)
        def far(at: str = "x") -> str:
            """Look."""
            return at
