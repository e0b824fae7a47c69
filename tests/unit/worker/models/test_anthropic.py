"""Anthropic's Messages, checked by the types of the official SDK."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import orjson
import pytest
from pydantic import ConfigDict, TypeAdapter, with_config
from support import vendors

from stepfleet.orchestrator import (
    FinishReason,
    LLMResponse,
    Message,
    ModelRequest,
    ModelSettings,
    Role,
    ToolCall,
    ToolSpec,
)
from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.models.pricing import Price
from stepfleet.orchestrator.records.responses import OutputFormat
from stepfleet.worker.models.anthropic import StreamedMessage, parse_message, request_body, usage_of
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

LOOK = ToolSpec(name="look", description="Look.", parameters={"type": "object", "properties": {}})
SIGNED = {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"}


@cache
def create() -> TypeAdapter[Any]:
    params = vendors.anthropic.types.message_create_params.MessageCreateParamsNonStreaming
    return TypeAdapter(with_config(ConfigDict(extra="forbid"))(params))


def body(*messages: Message, settings: dict[str, Any] | None = None, **fields: Any) -> Any:
    request = ModelRequest(
        model="claude-x",
        messages=messages or (Message.user("hi"),),
        settings=ModelSettings.model_validate(settings or {}),
        **fields,
    )
    made = request_body(request)
    create().validate_python(made)
    return made


def test_a_whole_conversation_has_the_sdks_types() -> None:
    call = ToolCall(id="call.1", name="look", arguments={"a": "é"})
    other = ToolCall(id="call_2", name="look", arguments={})
    reasoning = {"reasoning": {"provider": "anthropic", "at": 0, "data": SIGNED}}
    made = body(
        Message.system("Be brief."),
        Message(role=Role.DEVELOPER, content="In English."),
        Message.user([{"text": "see"}, {"image": {"source": {"url": "https://x/y.png"}}}]),
        Message.assistant([reasoning, {"text": "ok"}], (call, other)),
        Message.tool(call, "one"),
        Message.tool(other, ""),
        Message.user("And?"),
        tools=(LOOK,),
        tool_choice="look",
        parallel_tool_calls=False,
        output=OutputFormat(json_schema={"type": "object"}),
        settings={"stop": ["X"]},
    )
    assert [block["text"] for block in made["system"]] == ["Be brief.", "In English."]
    assert [turn["role"] for turn in made["messages"]] == ["user", "assistant", "user"]
    assert [block["type"] for block in made["messages"][1]["content"]] == [
        "thinking", "text", "tool_use", "tool_use",
    ]  # fmt: skip
    assert [block["type"] for block in made["messages"][2]["content"]] == [
        "tool_result", "tool_result", "text",
    ]  # fmt: skip
    used, answered = made["messages"][1]["content"][2], made["messages"][2]["content"][0]
    assert used["id"] == answered["tool_use_id"] == "call.1"  # as it was given: see `call_ids`
    assert made["tool_choice"] == {
        "type": "tool", "name": "look", "disable_parallel_tool_use": True,
    }  # fmt: skip
    assert made["stop_sequences"] == ["X"]


@pytest.mark.parametrize(
    ("settings", "thinking", "effort", "most"),
    [
        ({}, None, None, 16_384),
        ({"max_tokens": 5}, None, None, 5),
        ({"reasoning_effort": "none"}, {"type": "disabled"}, None, 16_384),
        ({"reasoning_effort": "minimal"}, {"type": "adaptive"}, "low", 16_384),
        ({"reasoning_effort": "high"}, {"type": "adaptive"}, "high", 16_384),
        ({"reasoning_budget": 0}, {"type": "disabled"}, None, 16_384),
        ({"reasoning_budget": 2048}, {"type": "enabled", "budget_tokens": 2048}, None, 18_432),
    ],
)
def test_reasoning_is_requested_by_effort_or_budget(
    settings: dict[str, Any], thinking: Any, effort: str | None, most: int
) -> None:
    made = body(settings=settings)
    assert (made.get("thinking"), made["max_tokens"]) == (thinking, most)
    assert made.get("output_config", {}).get("effort") == effort


def test_marks_stand_at_the_fixed_beginning_and_at_the_ends_of_the_last_two_user_turns() -> None:
    call = ToolCall(id="c", name="look", arguments={})
    talk: tuple[Message, ...] = (Message.system("s"), Message.user("a"))
    for _ in range(3):
        talk += (Message.assistant("", (call,)), Message.tool(call, "x"))
    made = body(*talk, tools=(LOOK,))
    marked = [turn for turn in made["messages"] if "cache_control" in turn["content"][-1]]
    assert "cache_control" in made["system"][-1]
    assert marked == [made["messages"][-3], made["messages"][-1]]
    assert b"cache_control" not in orjson.dumps(body(*talk, settings={"prompt_cache": False}))


HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
MARKED = {"type": "text", "text": "long", **HOUR}


@pytest.mark.parametrize(
    ("talk", "extra"),
    [
        ((Message.system("s"), Message.user([MARKED, {"text": "and"}])), {}),
        ((Message(role=Role.SYSTEM, content=[MARKED]), Message.user("a")), {}),
        (
            (
                Message.user("a"),
                Message.assistant("", (ToolCall(id="c", name="look", arguments={}),)),
                Message(role=Role.TOOL, content=[MARKED], tool_call_id="c"),
            ),
            {},
        ),
        ((Message.system("s"), Message.user("a")), HOUR),
        ((Message.user("a"),), {"system": [MARKED]}),
    ],
    ids=["a part", "the system", "a result", "the request", "extra_body"],
)
def test_marks_of_the_user_are_the_only_ones(
    talk: tuple[Message, ...], extra: dict[str, Any]
) -> None:
    """Ours would come before theirs with a shorter time, and there may be four in all."""
    made = body(*talk, tools=(LOOK,), settings={"extra_body": extra})
    text = orjson.dumps(made)
    assert text.count(b"cache_control") == text.count(orjson.dumps(HOUR)[1:-1]) == 1


def test_extra_body_overrules() -> None:
    assert body(settings={"extra_body": {"speed": "fast", "max_tokens": 9}})["max_tokens"] == 9


def test_an_answer_of_the_sdks_types_is_understood() -> None:
    payload = vendors.anthropic.types.Message.model_validate(
        {
            "id": "msg_1", "type": "message", "role": "assistant", "model": "claude-x-1",
            "content": [
                SIGNED, {"type": "text", "text": "a"}, {"type": "redacted_thinking", "data": "zz"},
                {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"x": 1}},
            ],
            "stop_reason": "tool_use", "stop_sequence": None,
            "usage": {
                "input_tokens": 10, "output_tokens": 5, "cache_read_input_tokens": 100,
                "cache_creation_input_tokens": 7, "output_tokens_details": {"thinking_tokens": 2},
            },
        }
    ).to_dict(mode="json")  # fmt: skip
    answer = parse_message(payload, "claude-x")
    assert (answer.content, answer.model) == ("a", "claude-x-1")
    assert answer.tool_calls == (ToolCall(id="toolu_1", name="look", arguments={"x": 1}),)
    places = [
        (block["reasoning"]["at"], block["reasoning"]["data"]["type"]) for block in answer.reasoning
    ]
    assert places == [(0, "thinking"), (1, "redacted_thinking")]
    back = body(Message.user("hi"), Message.assistant(answer.as_content, answer.tool_calls))
    assert [block["type"] for block in back["messages"][1]["content"]] == [
        "thinking", "text", "redacted_thinking", "tool_use",
    ]  # fmt: skip
    assert back["messages"][1]["content"][0] == SIGNED


def test_tokens_read_from_and_written_to_the_cache_are_prompt_tokens_with_their_prices() -> None:
    usage = usage_of(
        {
            "input_tokens": 10,
            "output_tokens": 5,
            "cache_read_input_tokens": 100,
            "cache_creation_input_tokens": 1000,
        }
    )
    assert usage is not None
    assert (usage.prompt_tokens, usage.cached_tokens, usage.cache_write_tokens) == (1110, 100, 1000)
    price = Price(input=10, output=50, cached_input=1, cache_write=12.5)
    assert price.cost(usage) == pytest.approx((100 + 100 + 12_500 + 250) / 1e6)


@pytest.mark.parametrize(
    ("for_hour", "counted"), [(400, 400), (9000, 1000), (0, 0), ("many", 0), (None, 0)]
)
def test_what_is_written_to_the_cache_for_an_hour_costs_twice_the_input(
    for_hour: Any, counted: int
) -> None:
    counts = {"input_tokens": 10, "output_tokens": 5, "cache_creation_input_tokens": 1000}
    usage = usage_of({**counts, "cache_creation": {"ephemeral_1h_input_tokens": for_hour}})
    assert usage is not None
    assert (usage.cache_write_tokens, usage.cache_write_1h_tokens) == (1000, counted)
    assert (usage + usage - usage) == usage
    price = Price(input=10, output=50, cache_write=12.5)
    expected = 100 + 20 * counted + 12.5 * (1000 - counted) + 250
    assert price.cost(usage) == pytest.approx(expected / 1e6)
    assert Price(input=10, output=50).cost(usage) == pytest.approx((10_100 + 250) / 1e6)


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("end_turn", FinishReason.STOP),
        ("stop_sequence", FinishReason.STOP),
        ("max_tokens", FinishReason.LENGTH),
        ("model_context_window_exceeded", FinishReason.LENGTH),
        ("refusal", FinishReason.CONTENT_FILTER),
        ("pause_turn", FinishReason.PAUSE),
        (None, FinishReason.OTHER),
    ],
)
def test_finish_reasons(reason: str | None, expected: FinishReason) -> None:
    details = {"explanation": "no"}
    content = [{"type": "text", "text": "a"}]
    payload: dict[str, Any] = {"content": content, "stop_reason": reason, "stop_details": details}
    assert parse_message(payload, "m").finish_reason is expected


SEARCH = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"q": "é"}}
FOUND = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
SAID = {"type": "text", "text": "found", "citations": [{"url": "https://x.test"}]}


def sent_back(content: list[dict[str, Any]], reason: str, *ids: str) -> list[dict[str, Any]]:
    """Return the turn that goes back for an answer, with results of its calls under `ids`."""
    answer = parse_message({"content": content, "stop_reason": reason}, "claude-x")
    calls = tuple(
        call.model_copy(update={"id": name})
        for call, name in zip(answer.tool_calls or (), ids, strict=True)
    )
    results = (Message.tool(call, "ok") for call in calls)
    talk = (Message.user("hi"), Message.assistant(answer.as_content, calls), *results)
    request = ModelRequest(model="claude-x", messages=talk)
    content_back: list[dict[str, Any]] = request_body(request)["messages"][1]["content"]
    return content_back


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([FOUND, SAID], "end_turn"),
        ([SIGNED, SEARCH, FOUND, SAID], "end_turn"),
        ([SIGNED, SEARCH, FOUND, SAID], "max_tokens"),
        ([{"type": "mcp_tool_use", "id": "m", "name": "q", "server_name": "s", "input": {}}, SAID],
         "end_turn"),
    ],
)  # fmt: skip
def test_a_turn_among_the_services_own_tools_goes_back_whole(
    content: list[dict[str, Any]], reason: str
) -> None:
    assert sent_back(content, reason) == content


@pytest.mark.parametrize("reason", ["tool_use", "pause_turn"])
def test_calls_beside_the_services_own_tools_go_back_once_at_their_place(reason: str) -> None:
    other = {**CALL, "id": "toolu_2"}
    content: list[dict[str, Any]] = [SIGNED, SEARCH, FOUND, CALL, SAID, other, SEARCH]
    assert sent_back(content, reason, "sent_1", "sent_2") == [
        *(SIGNED, SEARCH, FOUND, {**CALL, "id": "sent_1"}, SAID, {**CALL, "id": "sent_2"}, SEARCH),
    ]


def test_a_cut_turn_goes_back_without_what_the_service_had_begun() -> None:
    assert sent_back([SEARCH, FOUND, SAID, SIGNED, SEARCH], "max_tokens") == [SEARCH, FOUND, SAID]


@pytest.mark.parametrize("content", [None, "text", [1], {"type": "text"}])
def test_an_answer_without_blocks_is_malformed(content: Any) -> None:
    with pytest.raises(ModelError, match="malformed") as raised:
        parse_message({"content": content}, "m")
    assert raised.value.retryable


def streamed(events: list[bytes]) -> LLMResponse:
    answer = StreamedMessage()
    for event in events:
        answer.add(event)
    return parse_message(answer.payload(), "m")


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with ModelServer() as running:
        yield running


@pytest.fixture
def sdk(server: ModelServer) -> "vendors.anthropic.Anthropic":
    url = server.url.removesuffix("/v1")
    return vendors.anthropic.Anthropic(base_url=url, api_key="k", max_retries=0)


def test_the_official_client_understands_the_model_server(
    server: ModelServer, sdk: "vendors.anthropic.Anthropic"
) -> None:
    """So what our tests are answered with has the form of the service's answers."""
    server.script("hi", Reply("Hello!", (ToolCallReply("look", {"a": 1}),), reasoning="Hm."))
    tool: Any = {"name": "look", "input_schema": {"type": "object"}}
    asked: Any = {
        "model": "claude-x", "max_tokens": 50, "tools": [tool],
        "messages": [{"role": "user", "content": "hi"}],
    }  # fmt: skip
    whole = sdk.messages.create(**asked)
    with sdk.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == "Hello!"
        pieced = stream.get_final_message()
    for answer in (whole, pieced):
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
        assert answer.stop_reason == "tool_use"
        assert parse_message(answer.to_dict(mode="json"), "m").content == "Hello!"
    server.fail("rate_limited", attempt=None)
    with pytest.raises(vendors.anthropic.RateLimitError):
        sdk.messages.create(**asked)


def test_a_stream_gets_the_answer_that_is_sent_whole(
    server: ModelServer, sdk: "vendors.anthropic.Anthropic"
) -> None:
    server.script("hi", Reply("Hello!", (ToolCallReply("look", {"a": [1, "é"]}),), reasoning="Hm."))
    tool: Any = {"name": "look", "input_schema": {"type": "object"}}
    asked: Any = {
        "model": "claude-x", "max_tokens": 50, "tools": [tool],
        "messages": [{"role": "user", "content": "hi"}],
    }  # fmt: skip
    events = [one.to_dict(mode="json") for one in sdk.messages.create(**asked, stream=True)]
    adapter: TypeAdapter[Any] = TypeAdapter(vendors.anthropic.types.RawMessageStreamEvent)
    for event in events:
        adapter.validate_python(event)
    read = streamed([orjson.dumps(event) for event in events])
    whole = parse_message(sdk.messages.create(**asked).to_dict(mode="json"), "m")
    same = {"usage", "raw"}
    assert read.model_dump(exclude=same) == whole.model_dump(exclude=same)


@pytest.mark.parametrize(
    "events",
    [
        [
            b"{}",
            b'{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"x"}}',
        ],
        [b'{"type":"message_start","message":{}}', b'{"type":"message_stop"'],
        [b'{"type":"message_start","message":[]}'],
        [b'{"type":"content_block_start","index":"0","content_block":{}}'],
        [b"[]"],
    ],
)
def test_a_stream_that_is_none_is_malformed_and_tried_again(events: list[bytes]) -> None:
    with pytest.raises(ModelError, match="malformed") as raised:
        streamed(events)
    assert raised.value.retryable


def test_a_stream_of_many_blocks_is_bounded() -> None:
    answer = StreamedMessage()
    for index in range(10_000):
        block = {"type": "tool_use", "id": str(index), "name": "look", "input": {}}
        event = {"type": "content_block_start", "index": index, "content_block": block}
        answer.add(orjson.dumps(event))
    answer.add(b'{"type":"message_stop"}')
    assert len(parse_message(answer.payload(), "m").tool_calls or ()) == 257


def test_texts_that_the_service_refuses_are_left_out() -> None:
    """A text of whitespace before a call is usual, and refused when it comes back."""
    given = [
        SIGNED,
        {"type": "text", "text": "\n\n"},
        {"type": "tool_use", "id": "a", "name": "look"},
    ]
    answer = parse_message({"content": given}, "claude-x")
    calls = answer.tool_calls or ()
    made = body(
        Message.system(" "),
        Message.user("hi"),
        Message.assistant(answer.as_content, calls),
        Message.tool(calls[0], "\n"),
    )
    assert "system" not in made
    assert [block["type"] for block in made["messages"][1]["content"]] == ["thinking", "tool_use"]
    assert "content" not in made["messages"][2]["content"][0]


@pytest.mark.parametrize("text", ["", "\n"])
def test_thinking_stays_before_its_call_where_a_blank_text_was_first(text: str) -> None:
    given = [
        {"type": "text", "text": text},
        SIGNED,
        {"type": "tool_use", "id": "a", "name": "look"},
    ]
    answer = parse_message({"content": given}, "claude-x")
    made = body(Message.user("hi"), Message.assistant(answer.as_content, answer.tool_calls or ()))
    assert [block["type"] for block in made["messages"][1]["content"]] == ["thinking", "tool_use"]


def test_a_delta_with_a_strange_index_is_skipped() -> None:
    delta = {"type": "text_delta", "text": "x"}
    event = {"type": "content_block_delta", "index": [], "delta": delta}
    assert StreamedMessage().add(orjson.dumps(event)) == ""


@pytest.mark.parametrize(
    ("settings", "choice", "sent"),
    [
        ({"reasoning_budget": 1024}, "any", "auto"),
        ({"reasoning_effort": "low"}, "look", "auto"),
        ({"reasoning_effort": "low"}, "none", "none"),
        ({"reasoning_effort": "none"}, "look", "tool"),
        ({}, "any", "any"),
    ],
)
def test_a_call_is_not_forced_while_the_model_thinks(
    settings: dict[str, Any], choice: str, sent: str
) -> None:
    """The service refuses both together."""
    made = body(tools=(LOOK,), tool_choice=choice, settings=settings)
    assert made["tool_choice"] == {"type": sent, **({"name": "look"} if sent == "tool" else {})}
