from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.servers.raw_model_server import completion_body

from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.tools.calls import MOST_CALLS
from stepfleet.worker.models.http_model import EventLines
from stepfleet.worker.models.openai.answer import parse_completion
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
