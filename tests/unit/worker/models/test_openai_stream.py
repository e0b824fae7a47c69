from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.servers.raw_model_server import completion_body

from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.tools.calls import MOST_CALLS
from stepfleet.worker.models.event_lines import EventLines
from stepfleet.worker.models.openai.chat import parse_completion
from stepfleet.worker.models.openai.stream import StreamedCompletion


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "model": "gpt-4o-mini-2024-07-18",
        "choices": [{"index": 0, "delta": fields, "finish_reason": finish}],
    }


def call_delta(index: int | None, **function: Any) -> dict[str, Any]:
    call_id = function.pop("id", None)
    piece = {"function": function}
    return (
        piece | ({} if index is None else {"index": index}) | ({"id": call_id} if call_id else {})
    )


def assemble(*events: Any) -> StreamedCompletion:
    completion = StreamedCompletion()
    for event in events:
        completion.add(event if isinstance(event, bytes) else orjson.dumps(event))
    return completion


USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
END = {"id": "chatcmpl-1", "choices": [], "usage": USAGE}


@given(st.data())
def test_events_are_the_same_however_the_bytes_are_cut(data: st.DataObject) -> None:
    stream = b': hi\r\ndata: {"a":1}\r\n\r\nevent: x\ndata:one\ndata: two\n\ndata: [DONE]'
    cuts = data.draw(st.lists(st.integers(0, len(stream))).map(sorted))
    lines, got = EventLines(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += lines.feed(stream[start:end])
    assert [*got, *lines.end()] == [b'{"a":1}', b"one\ntwo", b"[DONE]"]


def test_a_streamed_text_is_equal_to_the_same_answer_in_one_piece() -> None:
    """STRM-07, STRM-08: text, finish reason and usage."""
    completion = assemble(
        delta(role="assistant", content=""), delta(content="hel"), delta(content="lo"),
        delta("stop"), END, b"[DONE]",
    )  # fmt: skip
    assert completion.is_over
    assert parse_completion(completion.payload(), "m") == parse_completion(
        completion_body("hello"), "m"
    ).model_copy(update={"raw": completion.payload()})


def test_pieces_of_calls_are_joined_and_never_told_as_text() -> None:
    """STRM-06: arguments do not leak into the text."""
    completion = StreamedCompletion()
    told = [
        completion.add(orjson.dumps(event))
        for event in (
            delta(tool_calls=[call_delta(0, id="a", name="one", arguments="")]),
            delta(tool_calls=[call_delta(1, id="b", name="two", arguments='{"x"')]),
            delta(tool_calls=[call_delta(0, arguments='{"y":'), call_delta(0, arguments="2}")]),
            delta(tool_calls=[call_delta(1, arguments=":1}")]),
            delta("tool_calls"),
        )
    ]
    calls = parse_completion(completion.payload(), "m").tool_calls
    assert calls is not None
    assert "".join(told) == ""
    assert [(one.id, one.name, one.arguments) for one in calls] == [
        ("a", "one", {"y": 2}),
        ("b", "two", {"x": 1}),
    ]


def test_calls_without_an_index_are_distinguished_by_their_ids() -> None:
    completion = assemble(
        delta(tool_calls=[call_delta(None, id="a", name="one", arguments="{")]),
        delta(tool_calls=[call_delta(None, arguments="}")]),
        delta(tool_calls=[call_delta(None, id="b", name="two", arguments="{}")]),
        delta("tool_calls"),
    )
    calls = parse_completion(completion.payload(), "m").tool_calls
    assert calls is not None
    assert [(one.id, one.name, one.error) for one in calls] == [
        ("a", "one", None),
        ("b", "two", None),
    ]


def test_a_stream_that_breaks_off_is_a_transient_model_error() -> None:
    with pytest.raises(ModelError, match="broke off") as raised:
        assemble(delta(content="half an ans")).payload()
    assert raised.value.retryable


def test_a_stream_that_only_says_done_has_no_choices() -> None:
    """LLM-17: an empty stream is malformed."""
    with pytest.raises(ModelError, match="no choices"):
        parse_completion(assemble(b"[DONE]").payload(), "m")


@pytest.mark.parametrize(
    "event", [b"{broken", b"[1]", {"choices": [{"delta": {"tool_calls": [1]}}]}]
)
def test_a_malformed_event_is_a_transient_model_error(event: Any) -> None:
    with pytest.raises(ModelError, match="malformed") as raised:
        assemble(event)
    assert raised.value.retryable


def test_an_error_event_ends_the_stream() -> None:
    completion = assemble(delta(content="x"), {"error": {"message": "overloaded"}})
    assert completion.is_over
    assert completion.error == {"error": {"message": "overloaded"}}


def test_a_stream_of_calls_without_end_keeps_no_more_than_are_answered() -> None:
    events = [
        delta(tool_calls=[call_delta(None, id=f"c{at}", name="look", arguments="{}")])
        for at in range(20_000)
    ]
    payload = assemble(*events, delta("tool_calls"), END).payload()
    assert len(payload["choices"][0]["message"]["tool_calls"]) == MOST_CALLS + 1
    answer = parse_completion(payload, "asked")
    assert "not executed" in str((answer.tool_calls or ())[-1].error)


def calls_of(completion: StreamedCompletion) -> list[tuple[str, Any]]:
    found = parse_completion(completion.payload(), "m").tool_calls or ()
    assert not any(one.error for one in found)
    return [(one.name, one.arguments) for one in found]


@pytest.mark.parametrize("index", [0, None])
@pytest.mark.parametrize("as_text", [True, False], ids=["text", "object"])
def test_whole_calls_without_ids_stay_apart(index: int | None, as_text: bool) -> None:
    arguments: list[Any] = [{"a": 1}, {"a": 5}]
    if as_text:
        arguments = ['{"a":1}', '{"a":5}']
    pieces = [call_delta(index, name="add", arguments=one) for one in arguments]
    found = calls_of(assemble(*(delta(tool_calls=[one]) for one in pieces), delta("tool_calls")))
    assert found == [("add", {"a": 1}), ("add", {"a": 5})]
    together = assemble(delta(tool_calls=pieces), delta("tool_calls"))
    assert calls_of(together) == found


def test_arguments_that_go_on_behind_a_bracket_stay_one_call() -> None:
    pieces = ('{"a": {"b": 1}', ', "c": {"d": 2}', "}")
    named = [delta(tool_calls=[call_delta(0, name="add", arguments=one)]) for one in pieces]
    assert calls_of(assemble(*named, delta("stop"))) == [("add", {"a": {"b": 1}, "c": {"d": 2}})]


def test_a_stream_may_name_its_deltas_messages() -> None:
    pieces = [
        {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]}
        for text in ("Hel", "lo")
    ]
    completion = StreamedCompletion()
    told = [completion.add(orjson.dumps(one)) for one in pieces]
    completion.add(orjson.dumps(delta("stop")))
    assert ("".join(told), parse_completion(completion.payload(), "m").content) == ("Hello",) * 2


def test_a_whole_message_behind_the_deltas_is_not_read_again() -> None:
    last = {"choices": [{"index": 0, "message": {"content": "Hello"}, "finish_reason": "stop"}]}
    completion = assemble(delta(content="Hel"), delta(content="lo"), last)
    assert parse_completion(completion.payload(), "m").content == "Hello"


def test_pieces_of_a_function_call_are_a_call() -> None:
    completion = assemble(
        delta(function_call={"name": "add", "arguments": '{"a"'}),
        delta(function_call={"arguments": ": 1}"}),
        delta("function_call"),
    )
    assert calls_of(completion) == [("add", {"a": 1})]


def test_choices_are_told_apart_by_their_index() -> None:
    def piece(index: int, **fields: Any) -> dict[str, Any]:
        return {"choices": [{"index": index, "delta": fields, "finish_reason": None}]}

    call = call_delta(0, id="c1", name="add", arguments="{}")
    completion = StreamedCompletion()
    events = (
        piece(0, content="Let me "), piece(1, tool_calls=[call]), piece(0, content="see."),
        piece(2, content="another"), delta("tool_calls"),
    )  # fmt: skip
    assert "".join(completion.add(orjson.dumps(one)) for one in events) == "Let me see."
    answer = parse_completion(completion.payload(), "m")
    assert (answer.content, [one.name for one in answer.tool_calls or ()]) == (
        "Let me see.",
        ["add"],
    )


def test_thoughts_of_a_streamed_content_are_reasoning() -> None:
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}
    completion = assemble(
        delta(content=[thinking]), delta(content=[{"type": "text", "text": "Yes."}]), delta("stop")
    )
    answer = parse_completion(completion.payload(), "m")
    assert (answer.reasoning_text, answer.content) == ("Hm.", "Yes.")


@given(st.data())
def test_every_line_end_ends_a_line_however_the_bytes_are_cut(data: st.DataObject) -> None:
    end = data.draw(st.sampled_from((b"\n", b"\r", b"\r\n")))
    stream = end.join((b": hi", b"data: one", b"data: two", b"", b"", b'data: {"a":1}', b"", b""))
    cuts = data.draw(st.lists(st.integers(0, len(stream))).map(sorted))
    lines, got = EventLines(), []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += lines.feed(stream[start:stop])
    assert [*got, *lines.end()] == [b"one\ntwo", b'{"a":1}']


def test_an_event_without_data_is_none() -> None:
    assert EventLines().feed(b"data:\n\nevent: ping\ndata: \n\ndata: 1\n\n") == [b"1"]


WORDS = delta("stop", content="a")
ZEROS = dict.fromkeys(USAGE, 0)
REPORTS: dict[str, list[dict[str, Any]]] = {
    "zeros behind it": [{**WORDS, "usage": USAGE}, {"choices": [], "usage": ZEROS}],
    "its parts apart": [
        {**WORDS, "usage": {"prompt_tokens": 10, "completion_tokens": 0, "total_tokens": 10}},
        {"choices": [], "usage": {"prompt_tokens": 0, "completion_tokens": 5, "total_tokens": 5}},
    ],
    "in a choice": [{"choices": [{**WORDS["choices"][0], "usage": USAGE}]}],
    "Groq's": [{**WORDS, "x_groq": {"id": "r", "usage": USAGE}}],
}


@pytest.mark.parametrize("case", REPORTS)
def test_a_stream_has_the_largest_counts_that_it_reports(case: str) -> None:
    usage = parse_completion(assemble(*REPORTS[case]).payload(), "m").usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (10, 5, 15)


def test_details_of_a_usage_are_merged_too() -> None:
    details = {"prompt_tokens_details": {"cached_tokens": 4}}
    zero = {"prompt_tokens_details": {"cached_tokens": 0}}
    stream = assemble({**WORDS, "usage": {**USAGE, **details}}, {"usage": {**USAGE, **zero}})
    usage = parse_completion(stream.payload(), "m").usage
    assert usage is not None
    assert usage.cached_tokens == 4


def test_groqs_word_of_a_failure_is_the_failure() -> None:
    stream = assemble({**delta(content="a"), "x_groq": {"id": "r", "error": "over_capacity"}})
    assert stream.is_over
    assert stream.error == {"error": "over_capacity"}
