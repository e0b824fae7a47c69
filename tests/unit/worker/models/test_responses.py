"""OpenAI's Responses, checked by the types of the official SDK and by its client."""

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
    ToolCall,
    ToolSpec,
)
from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.records.responses import OutputFormat
from stepfleet.worker.attempt.made_calls import no_answer
from stepfleet.worker.models.responses import (
    StreamedResponse,
    parse_response,
    request_body,
    usage_of,
)
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

CLOSED = {
    "type": "object",
    "properties": {"a": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}
LOOK = ToolSpec(name="look", description="Look.", parameters={"type": "object", "properties": {}})
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "xyz"}


@cache
def create() -> TypeAdapter[Any]:
    params = vendors.openai.types.responses.response_create_params
    made = params.ResponseCreateParamsNonStreaming
    return TypeAdapter(with_config(ConfigDict(extra="forbid"))(made))


def body(*messages: Message, settings: dict[str, Any] | None = None, **fields: Any) -> Any:
    request = ModelRequest(
        model="gpt-x",
        messages=messages or (Message.user("hi"),),
        settings=ModelSettings.model_validate(settings or {}),
        **fields,
    )
    made = request_body(request)
    create().validate_python(made)
    return made


def test_a_whole_conversation_has_the_sdks_types() -> None:
    call = ToolCall(id="call_1", name="look", arguments={"a": "é"})
    other = ToolCall(id="call_2", name="look", arguments={})
    thought = {"reasoning": {"provider": "openai", "at": 1, "data": THOUGHT}}
    foreign = {"reasoning": {"provider": "anthropic", "at": 0, "data": {"type": "thinking"}}}
    made = body(
        Message.system("Be brief."),
        Message.user([{"text": "see"}, {"image": {"source": {"url": "https://x/y.png"}}}]),
        Message.assistant([thought, foreign, {"text": "ok"}], (call, other)),
        Message.tool(call, "one"),
        Message.tool(other, "two"),
        Message.user("And?"),
        tools=(LOOK, ToolSpec(name="shut", parameters=CLOSED)),
        tool_choice="look",
        parallel_tool_calls=False,
        output=OutputFormat(name="place", json_schema=CLOSED),
        settings={"temperature": 0.5, "reasoning_effort": "low", "max_tokens": 5},
    )
    assert [item["type"] for item in made["input"]] == [
        "message", "message", "message", "reasoning", "function_call", "function_call",
        "function_call_output", "function_call_output", "message",
    ]  # fmt: skip
    assert made["input"][3] == THOUGHT
    assert [tool["strict"] for tool in made["tools"]] == [False, True]
    assert made["tool_choice"] == {"type": "function", "name": "look"}
    assert made["text"]["format"] == {
        "type": "json_schema", "name": "place", "schema": CLOSED, "strict": True,
    }  # fmt: skip
    assert (made["store"], made["include"]) == (False, ["reasoning.encrypted_content"])
    assert (made["reasoning"], made["max_output_tokens"]) == ({"effort": "low"}, 5)


def answered(output: list[dict[str, Any]], **fields: Any) -> LLMResponse:
    payload = {
        "id": "resp_1", "object": "response", "created_at": 1, "status": "completed",
        "model": "gpt-x-1", "output": output, "parallel_tool_calls": True, "tools": [],
        "tool_choice": "auto", **fields,
    }  # fmt: skip
    return parse_response(
        vendors.openai.types.responses.Response.model_validate(payload).to_dict(mode="json"),
        "gpt-x",
    )


def text(words: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": words, "annotations": []}
    message = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}
    return {**message, "content": [part]}


def test_an_answer_of_the_sdks_types_is_understood() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"x":1}'}
    answer = answered([THOUGHT, text("a"), call])
    assert (answer.content, answer.model) == ("a", "gpt-x-1")
    assert answer.tool_calls == (ToolCall(id="c1", name="look", arguments={"x": 1}),)
    assert answer.finish_reason is FinishReason.TOOL_CALLS
    back = body(Message.user("hi"), Message.assistant(answer.as_content, answer.tool_calls))
    kinds = [item["type"] for item in back["input"]]
    assert kinds == ["message", "reasoning", "message", "function_call"]
    assert back["input"][1] == THOUGHT


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, FinishReason.STOP),
        (
            {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
            FinishReason.LENGTH,
        ),
        (
            {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}},
            FinishReason.CONTENT_FILTER,
        ),
        ({"status": None}, FinishReason.OTHER),
    ],
)
def test_finish_reasons(fields: dict[str, Any], expected: FinishReason) -> None:
    assert answered([text("a")], **fields).finish_reason is expected


def test_a_refusal_is_the_text_and_the_reason() -> None:
    refusal = {**text(""), "content": [{"type": "refusal", "refusal": "No."}]}
    answer = answered([refusal])
    assert (answer.content, answer.finish_reason) == ("No.", FinishReason.CONTENT_FILTER)


def test_usage_has_cached_written_and_reasoning_tokens() -> None:
    usage = usage_of(
        {
            "input_tokens": 10,
            "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 2},
            "output_tokens": 5,
            "output_tokens_details": {"reasoning_tokens": 3},
        }
    )
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (10, 5, 15)
    assert (usage.cached_tokens, usage.cache_write_tokens, usage.reasoning_tokens) == (4, 2, 3)
    assert usage_of({"input_tokens": "10"}) is None


@pytest.mark.parametrize("payload", [{}, {"output": {}}, {"output": ["x"]}])
def test_an_answer_that_is_none_is_malformed_and_tried_again(payload: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="malformed") as raised:
        parse_response(payload, "m")
    assert raised.value.retryable


@pytest.mark.parametrize("event", [b"[]", b"{", b'{"type":"response.completed"}'])
def test_an_event_that_is_none_is_malformed(event: bytes) -> None:
    with pytest.raises(ModelError, match="malformed"):
        StreamedResponse().add(event)


def test_a_stream_ends_with_its_error_or_is_broken() -> None:
    stream = StreamedResponse()
    with pytest.raises(ModelError, match="broke off"):
        stream.payload()
    stream.add(b'{"type":"error","code":"rate_limit_exceeded","message":"slow down"}')
    assert stream.is_over
    assert stream.error == {
        "error": {"type": "error", "code": "rate_limit_exceeded", "message": "slow down"}
    }


def test_a_last_event_without_items_has_those_that_came_before() -> None:
    stream = StreamedResponse()
    done = {"type": "response.output_item.done", "output_index": 0, "item": text("a")}
    stream.add(orjson.dumps(done))
    stream.add(b'{"type":"response.completed","response":{"status":"completed","output":[]}}')
    assert parse_response(stream.payload(), "m").content == "a"


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with ModelServer() as running:
        yield running


def test_the_official_client_understands_the_model_server(server: ModelServer) -> None:
    """So what our tests are answered with has the form of the service's answers."""
    client = vendors.openai.OpenAI(base_url=server.url, api_key="k", max_retries=0)
    server.script("hi", Reply("Hello!", (ToolCallReply("look", {"a": 1}),), reasoning="Hm."))
    tool: Any = {"type": "function", "name": "look", "parameters": CLOSED, "strict": True}
    whole = client.responses.create(model="gpt-x", input="hi", tools=[tool])
    with client.responses.stream(model="gpt-x", input="hi", tools=[tool]) as stream:
        pieces = [one.delta for one in stream if one.type == "response.output_text.delta"]
        streamed = stream.get_final_response()
    assert "".join(pieces) == whole.output_text == streamed.output_text == "Hello!"
    for answer in (whole, streamed):
        kinds = [item.type for item in answer.output]
        assert kinds == ["reasoning", "message", "function_call"]
    server.fail("rate_limited", attempt=None)
    with pytest.raises(vendors.openai.RateLimitError):
        client.responses.create(model="gpt-x", input="hi", tools=[tool])


def test_reasoning_stays_before_its_call_where_an_empty_text_was_first() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    thought = {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "x"}
    answer = answered([text(""), thought, call])
    made = body(Message.user("hi"), Message.assistant(answer.as_content, answer.tool_calls or ()))
    assert [item["type"] for item in made["input"]] == ["message", "reasoning", "function_call"]


@pytest.mark.parametrize(
    ("model", "reasons"),
    [("gpt-4o-mini", False), ("gpt-4.1", False), ("ft:gpt-4o:me::1", False),
     ("gpt-5-chat-latest", False), ("chatgpt-4o-latest", False),
     ("gpt-5.5", True), ("o4-mini", True), ("mine", True)],
)  # fmt: skip
def test_encrypted_reasoning_is_requested_of_models_that_reason(model: str, reasons: bool) -> None:
    """The service answers 400 to the request of it from another model."""
    made = request_body(ModelRequest(model=model, messages=(Message.user("hi"),)))
    assert ("include" in made) == reasons


def test_reasoning_that_the_service_does_not_know_again_is_not_sent_back() -> None:
    """Nothing is stored there: only encrypted reasoning is known from its item."""
    answer = answered([{"type": "reasoning", "id": "rs", "summary": []}, text("ok")])
    assert answer.reasoning == ()


CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "look"}
EMPTY_END = {"type": "response.completed", "response": {"status": "completed", "output": []}}


def delta(words: str, at: int = 0) -> dict[str, Any]:
    told = {"item_id": f"msg_{at}", "output_index": at, "content_index": 0, "delta": words}
    return {"type": "response.output_text.delta", **told}


def item(kind: str, given: dict[str, Any], at: int = 0) -> dict[str, Any]:
    return {"type": f"response.output_item.{kind}", "output_index": at, "item": given}


def arguments(kind: str, **fields: Any) -> dict[str, Any]:
    return {
        "type": f"response.function_call_arguments.{kind}",
        "item_id": "fc_1",
        "output_index": 0,
        **fields,
    }


def streamed(*events: dict[str, Any]) -> LLMResponse:
    stream = StreamedResponse()
    for event in events:
        stream.add(orjson.dumps(event))
    return parse_response(stream.payload(), "m")


PART = {"item_id": "msg_0", "output_index": 0, "content_index": 0}
TOLD_TEXTS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "one item ended": ([delta("a "), item("done", text("a ")), delta("b", 1)], "a b"),
    "a text done": ([{"type": "response.output_text.done", **PART, "text": "a"}], "a"),
    "all of a text once more": (
        [delta("a"), {"type": "response.output_text.done", **PART, "text": "a"}], "a"),
    "a part done": ([{"type": "response.content_part.done", **PART,
                      "part": {"type": "output_text", "text": "a"}}], "a"),
    "pieces without an index": (
        [{"type": "response.output_text.delta", "delta": one} for one in "ab"], "ab"),
    "ids without an index": (
        [{"type": "response.output_text.delta", "item_id": one, "delta": one} for one in "aba"],
        "aab"),
    "an item ended without its text": (
        [delta("a"), item("done", {**text(""), "content": []})], "a"),
    "an item begun": ([item("added", {**text(""), "content": []}), delta("a")], "a"),
}  # fmt: skip


@pytest.mark.parametrize("case", TOLD_TEXTS)
def test_a_last_event_without_items_has_the_text_that_was_told(case: str) -> None:
    events, expected = TOLD_TEXTS[case]
    assert streamed(*events, EMPTY_END).content == expected


def test_a_text_that_was_told_stands_beside_a_call() -> None:
    call = {**CALL, "arguments": "{}"}
    for at in (0, 1):  # some servers give both the same index
        answer = streamed(delta("Let me look"), item("done", call, at), EMPTY_END)
        assert answer.content == "Let me look"
        assert answer.tool_calls == (ToolCall(id="c1", name="look"),)


def test_a_text_that_was_told_is_not_lost_beside_reasoning_in_the_last_event() -> None:
    end = {"status": "completed", "output": [{"type": "reasoning", "id": "rs", "summary": []}]}
    answer = streamed(delta("a"), {"type": "response.completed", "response": end})
    assert answer.content == "a"


@pytest.mark.parametrize(
    "events",
    [
        [arguments("delta", delta='{"a":'), arguments("delta", delta="1}")],
        [arguments("done", arguments='{"a":1}')],
        [arguments("delta", delta='{"a":1}'), arguments("done", arguments='{"a":1}')],
    ],
)
def test_a_call_whose_item_does_not_end_is_a_call(events: list[dict[str, Any]]) -> None:
    begun = item("added", {**CALL, "arguments": "", "status": "in_progress"})
    answer = streamed(begun, *events, EMPTY_END)
    assert answer.tool_calls == (ToolCall(id="c1", name="look", arguments={"a": 1}),)


def test_a_call_that_the_model_did_not_finish_is_not_executed() -> None:
    details = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    whole = {"output": [{**CALL, "arguments": "{}", "status": "incomplete"}], **details}
    begun = item("added", {**CALL, "arguments": "", "status": "in_progress"})
    end = {"type": "response.incomplete", "response": {"output": [], **details}}
    for answer in (
        parse_response(whole, "m"),
        streamed(begun, arguments("delta", delta="{}"), end),
    ):
        (call,) = answer.tool_calls or ()
        assert (call.id, call.name) == ("c1", "look")
        assert "was cut" in (call.error or "")


def test_a_stream_that_ends_with_chats_word_alone_broke_off() -> None:
    stream = StreamedResponse()
    stream.add(orjson.dumps(delta("a")))
    stream.add(b"[DONE]")
    assert stream.is_over
    with pytest.raises(ModelError, match="broke off"):
        stream.payload()


def test_texts_in_the_form_of_a_request_are_read() -> None:
    message = {"type": "message", "role": "assistant"}
    for content in ("a", [{"type": "text", "text": "a"}]):
        payload = {"status": "completed", "output": [{**message, "content": content}]}
        assert parse_response(payload, "m").content == "a"


def test_an_image_in_the_place_of_a_text_is_named() -> None:
    image = {"type": "image_generation_call", "id": "ig", "status": "completed", "result": "AAAA"}
    answer = parse_response({"status": "completed", "output": [image]}, "m")
    assert (answer.content, answer.unread) == ("", "an image")


def phased(phase: str, words: str) -> dict[str, Any]:
    return {**text(words), "phase": phase}


SAID = {"type": "message", "role": "assistant", "content": "I look.", "phase": "commentary"}
LOOKED = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
ASIDE, FINAL = phased("commentary", "I look."), phased("final_answer", "Two.")


@pytest.mark.parametrize(
    ("output", "content", "aside", "back"),
    [
        ([ASIDE, FINAL], "Two.", "I look.", [SAID, {**SAID, "content": "Two.",
                                                   "phase": "final_answer"}]),
        ([text("Hm."), FINAL], "Two.", "Hm.", None),
        ([ASIDE, text("Two.")], "Two.", "I look.", None),
        ([ASIDE, LOOKED], "", "I look.", [SAID, LOOKED]),
        ([ASIDE], "", "I look.", []),
    ],
)  # fmt: skip
def test_what_a_model_says_on_its_way_is_not_its_answer_and_goes_back_with_its_phase(
    output: list[dict[str, Any]], content: str, aside: str, back: list[dict[str, Any]] | None
) -> None:
    answer = answered(output)
    assert (answer.content, answer.reasoning_text) == (content, aside)
    assert bool(no_answer(answer, allowed=False)) == (not back and back is not None)
    sent = Message.assistant(answer.as_content, answer.tool_calls or ())
    made = request_body(ModelRequest(model="gpt-x", messages=(Message.user("hi"), sent)))["input"]
    create().validate_python({"model": "gpt-x", "input": made})
    if back is not None:
        assert made[1:] == back


def test_streamed_text_is_that_of_the_answer_where_its_item_tells_the_phase() -> None:
    stream = StreamedResponse()
    events = [item("added", {**ASIDE, "content": []}), delta("I look."),
              item("added", {**FINAL, "content": []}, 1), delta("Two.", 1), EMPTY_END]  # fmt: skip
    assert [stream.add(orjson.dumps(one)) for one in events] == ["", "", "", "Two.", ""]
    assert parse_response(stream.payload(), "m").content == "Two."


def told_calls(
    begun: dict[str, Any], piece: dict[str, Any], ended: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the events of two calls; "{}" in the fields of an event is the name of each."""
    events = []
    for name in ("a", "b"):
        one = {**CALL, "call_id": f"call_{name}", "arguments": ""}
        del one["id"]
        given = orjson.dumps({"n": name}).decode()
        begin, go_on, end = (
            {field: value.format(name) for field, value in fields.items()}
            for fields in (begun, piece, ended)
        )
        events += [
            {"type": "response.output_item.added", "item": {**one, **begin}},
            {"type": "response.function_call_arguments.delta", "delta": given, **go_on},
            {"type": "response.output_item.done", "item": {**one, "arguments": given, **end}},
        ]
    return events


UNINDEXED: dict[str, list[dict[str, Any]]] = {
    "ids of calls in pieces": told_calls(
        {"call_id": "call_{}"}, {"item_id": "call_{}"}, {"call_id": "call_{}"}),
    "no ids in pieces": told_calls({}, {}, {}),
    "ids of items in pieces alone": told_calls({}, {"item_id": "fc_{}"}, {}),
    "ids of items everywhere": told_calls({"id": "fc_{}"}, {"item_id": "fc_{}"}, {"id": "fc_{}"}),
    "one id for all items": told_calls({"id": "fc"}, {}, {"id": "fc"}),
    "no ends": [one for one in told_calls({}, {"item_id": "call_{}"}, {})
                if not one["type"].endswith("item.done")],
    "ends alone": [one for one in told_calls({}, {}, {}) if one["type"].endswith("item.done")],
    "one index for all": [{**one, "output_index": 0} for one in told_calls({}, {}, {})],
}  # fmt: skip


@pytest.mark.parametrize("case", UNINDEXED)
def test_calls_without_an_index_have_their_own_arguments(case: str) -> None:
    answer = streamed(*UNINDEXED[case], EMPTY_END)
    expected = [(f"call_{name}", {"n": name}) for name in ("a", "b")]
    assert [(one.id, one.arguments) for one in answer.tool_calls or ()] == expected
