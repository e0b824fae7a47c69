import json
from typing import Any

import orjson
import pytest
from support.servers.raw_model_server import completion_body

from stepfleet.orchestrator import FinishReason, LLMResponse, UsageStats
from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.tools.calls import MOST_CALLS
from stepfleet.worker.models.bodies import parse_body
from stepfleet.worker.models.openai.chat import (
    finish_reason,
    parse_completion,
    usage_of,
)
from stepfleet.worker.models.openai.stream import StreamedCompletion


def parse(content: str | None = "hello", **message: Any) -> LLMResponse:
    return parse_completion(completion_body(content, **message), "asked")


def call(name: str = "search", arguments: str = '{"q": 1}', call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_an_answer_has_text_usage_model_and_the_raw_payload() -> None:
    """LLM-02: content, tool_calls or None, usage, model, raw."""
    payload = completion_body("hello")
    assert parse_completion(payload, "asked") == LLMResponse(
        content="hello",
        tool_calls=None,
        usage=UsageStats(prompt_tokens=10, completion_tokens=5, total_tokens=15, llm_calls=1),
        model="gpt-4o-mini-2024-07-18",
        finish_reason=FinishReason.STOP,
        raw=payload,
    )


def test_a_payload_without_a_model_is_of_the_model_that_was_asked() -> None:
    payload = completion_body() | {"model": None}
    assert parse_completion(payload, "asked").model == "asked"


def test_null_content_beside_a_call_is_empty_text() -> None:
    """MSG-12, MSG-13: arguments never stand in for text."""
    answer = parse(None, tool_calls=[call()])
    assert answer.content == ""
    assert answer.tool_calls is not None
    assert answer.tool_calls[0].arguments == {"q": 1}


def test_natural_language_beside_a_call_is_kept() -> None:
    """MSG-14: the text stays."""
    assert parse("I'll look it up", tool_calls=[call()]).content == "I'll look it up"


def test_text_that_is_the_arguments_of_a_call_is_dropped() -> None:
    """MSG-15 at the adapter: leaked arguments do not reach the history."""
    assert parse('{ "q": 1 }', tool_calls=[call()]).content == ""


def test_a_final_answer_is_the_text_as_it_came() -> None:
    """MSG-16: JSON as an answer is no leak without a call."""
    assert parse('{"q": 1}').content == '{"q": 1}'


def test_a_malformed_call_is_kept_with_its_error() -> None:
    calls = parse(None, tool_calls=[call(arguments="{broken")]).tool_calls
    assert calls is not None
    assert calls[0].error


def test_calls_of_one_answer_get_different_ids() -> None:
    calls = parse(None, tool_calls=[call(call_id="0"), call(call_id="0")]).tool_calls
    assert calls is not None
    assert calls[0].id == "0"
    assert calls[1].id != "0"


def test_an_empty_list_of_calls_is_none() -> None:
    assert parse("x", tool_calls=[]).tool_calls is None


def test_text_in_parts_is_joined() -> None:
    payload = completion_body()
    payload["choices"][0]["message"]["content"] = [{"type": "text", "text": "a"}, {"text": "b"}]
    assert parse_completion(payload, "m").content == "ab"


def test_a_refusal_is_the_text_and_counts_as_filtered() -> None:
    answer = parse(None, refusal="I cannot help with that.")
    assert answer.content == "I cannot help with that."
    assert answer.finish_reason is FinishReason.CONTENT_FILTER


@pytest.mark.parametrize(
    "payload",
    [
        {},
        {"choices": None},
        {"choices": []},
        {"choices": ["text"]},
        {"choices": [{}]},
        {"choices": [{"message": None}]},
        {"choices": [{"message": {"content": 5}}]},
        {"choices": [{"message": {"content": [{"text": 5}]}}]},
        {"choices": [{"message": {"content": "x", "tool_calls": "search"}}]},
    ],
)
def test_a_malformed_answer_is_a_transient_model_error(payload: dict[str, Any]) -> None:
    """LLM-17: no choices, no message."""
    with pytest.raises(ModelError, match="malformed") as raised:
        parse_completion(payload, "m")
    assert raised.value.retryable


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'"text"', b"[" * 100_000, b'{"a":'])
def test_a_body_that_is_no_json_object_is_a_transient_model_error(body: Any) -> None:
    """LLM-17: nesting is bounded too."""
    with pytest.raises(ModelError, match="malformed") as raised:
        parse_body(body)
    assert raised.value.retryable


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("stop", FinishReason.STOP),
        ("length", FinishReason.LENGTH),
        ("tool_calls", FinishReason.TOOL_CALLS),
        ("function_call", FinishReason.TOOL_CALLS),
        ("content_filter", FinishReason.CONTENT_FILTER),
        ("error", FinishReason.ERROR),
        ("STOP", FinishReason.STOP),
        ("moonlight", FinishReason.OTHER),
        (None, FinishReason.OTHER),
        (7, FinishReason.OTHER),
    ],
)
def test_finish_reasons_share_one_vocabulary(said: Any, meant: FinishReason) -> None:
    """LLM-11: stop, length, tool_calls, content_filter, error, other."""
    assert finish_reason(said, asks_for_tools=False) is meant


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("stop", FinishReason.TOOL_CALLS),
        (None, FinishReason.TOOL_CALLS),
        ("length", FinishReason.LENGTH),
    ],
)
def test_stop_beside_tool_calls_means_tool_calls(said: Any, meant: FinishReason) -> None:
    """LLM-11: some servers, and forced calls, end with stop."""
    assert finish_reason(said, asks_for_tools=True) is meant


def test_cached_and_reasoning_tokens_are_read() -> None:
    usage = {
        "prompt_tokens": 100,
        "completion_tokens": 50,
        "total_tokens": 150,
        "prompt_tokens_details": {"cached_tokens": 64},
        "completion_tokens_details": {"reasoning_tokens": 20},
    }
    assert usage_of(usage) == UsageStats(
        prompt_tokens=100,
        completion_tokens=50,
        total_tokens=150,
        llm_calls=1,
        cached_tokens=64,
        reasoning_tokens=20,
    )


def test_a_missing_total_is_the_sum() -> None:
    usage = usage_of({"prompt_tokens": 2, "completion_tokens": 3})
    assert usage is not None
    assert usage.total_tokens == 5


@pytest.mark.parametrize(
    "usage",
    [None, [], {}, {"prompt_tokens": "three", "completion_tokens": 1}, {"prompt_tokens": -1}],
)
def test_absent_or_senseless_usage_is_none(usage: Any) -> None:
    """LLM-12: absence is tolerated and visible."""
    payload = completion_body() | {"usage": usage}
    assert parse_completion(payload, "m").usage is None


def test_the_raw_payload_is_not_part_of_the_stored_answer() -> None:
    assert "chatcmpl-1" not in json.dumps(parse().to_dict())


def test_calls_beyond_the_bound_are_not_executed_and_the_model_learns_it() -> None:
    answer = parse(None, tool_calls=[call(call_id="same") for _ in range(8000)])
    calls = answer.tool_calls or ()
    assert len(calls) == MOST_CALLS + 1
    assert len({one.id for one in calls}) == len(calls)
    assert all(one.error is None for one in calls[:-1])
    assert "more than 256 tool calls" in str(calls[-1].error)
    assert "not executed" in str(calls[-1].error)


def test_as_many_calls_as_the_bound_are_all_executed() -> None:
    calls = parse(None, tool_calls=[call()] * MOST_CALLS).tool_calls or ()
    assert [one.error for one in calls] == [None] * MOST_CALLS


@pytest.mark.parametrize("count", ["9223372036854775807", "-1", "1e400", "1e300", "NaN", "1.5"])
def test_counts_that_cannot_be_are_no_report(count: str) -> None:
    body = f'{{"usage": {{"prompt_tokens": 1, "completion_tokens": {count}}}}}'
    try:
        usage = usage_of(parse_body(body.encode())["usage"])
    except ModelError:
        return  # not JSON in the first place
    assert usage is None


def test_an_answer_may_be_split_into_choices_with_its_text_and_its_calls() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    first = {"message": {"role": "assistant", "content": "Let me see."}, "finish_reason": "stop"}
    second = {
        "message": {"role": "assistant", "content": None, "tool_calls": [call]},
        "finish_reason": "tool_calls",
    }
    for choices in ([first, second], [second, first]):
        answer = parse_completion({"choices": choices}, "m")
        assert (answer.content, answer.finish_reason) == ("Let me see.", FinishReason.TOOL_CALLS)
        assert [one.name for one in answer.tool_calls or ()] == ["look"]


def test_a_function_call_is_a_call() -> None:
    body = completion_body(None, function_call={"name": "look", "arguments": '{"a": 1}'})
    (call,) = parse_completion(body, "m").tool_calls or ()
    assert (call.name, call.arguments, call.error) == ("look", {"a": 1}, None)
    empty = {"name": "", "arguments": ""}  # beside real calls, and beside none
    assert parse_completion(completion_body("x", function_call=empty), "m").tool_calls is None


def test_thoughts_in_the_content_are_reasoning() -> None:
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}
    body = completion_body(None)
    body["choices"][0]["message"]["content"] = [thinking, {"type": "text", "text": "Yes."}]
    answer = parse_completion(body, "m")
    assert (answer.reasoning_text, answer.content) == ("Hm.", "Yes.")


CHOICES: dict[str, dict[str, Any]] = {
    "an object with text": {"message": {"content": {"text": "hello"}}},
    "a part": {"message": {"content": {"type": "text", "text": "hello"}}},
    "the text of a completion before chat": {"text": "hello"},
    "a transcript": {"message": {"content": None, "audio": {"data": "A", "transcript": "hello"}}},
}


@pytest.mark.parametrize("form", ["whole", "streamed"])
@pytest.mark.parametrize("case", CHOICES)
def test_a_text_is_read_in_every_form(case: str, form: str) -> None:
    choice = {"index": 0, "finish_reason": "stop", **CHOICES[case]}
    assert read(choice, form).content == "hello"


@pytest.mark.parametrize("form", ["whole", "streamed"])
def test_an_object_in_the_place_of_a_text_is_its_json(form: str) -> None:
    message = {"content": {"answer": "hello"}}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    assert read(choice, form).content == '{"answer":"hello"}'


@pytest.mark.parametrize("form", ["whole", "streamed"])
@pytest.mark.parametrize(
    ("message", "unread"),
    [
        (
            {"content": "", "images": [{"type": "image_url", "image_url": {"url": "data:"}}]},
            "image",
        ),
        ({"content": [{"type": "image_url", "image_url": {"url": "data:"}}]}, "image"),
        ({"content": "hello"}, ""),
    ],
)
def test_content_that_is_not_read_is_named(message: dict[str, Any], unread: str, form: str) -> None:
    answer = read({"index": 0, "finish_reason": "stop", "message": message}, form)
    assert unread in answer.unread
    assert bool(answer.unread) == bool(unread)


def read(choice: dict[str, Any], form: str) -> LLMResponse:
    payload = {"choices": [choice]}
    if form == "streamed":
        stream = StreamedCompletion()
        stream.add(orjson.dumps(payload))
        payload = stream.payload()
    return parse_completion(payload, "m")
