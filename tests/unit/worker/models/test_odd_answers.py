"""Answers that servers and proxies give in other forms than their protocols have, and are whole."""

import base64
from typing import Any

import orjson
import pytest

from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.records.errors import ModelErrorCode
from stepfleet.orchestrator.records.responses import LLMResponse
from stepfleet.orchestrator.records.steps import FinishReason
from stepfleet.worker.attempt.made_calls import no_answer
from stepfleet.worker.models.anthropic import MESSAGES
from stepfleet.worker.models.bedrock.converse import CONVERSE
from stepfleet.worker.models.event_lines import EventLines
from stepfleet.worker.models.google import GENERATE_CONTENT
from stepfleet.worker.models.http_model import Format
from stepfleet.worker.models.openai.chat import CHAT_COMPLETIONS
from stepfleet.worker.models.responses import RESPONSES

Event = dict[str, Any]
DONE = "[DONE]"


def streamed(form: Format, events: list[Any]) -> LLMResponse:
    stream = form.stream()
    for event in events:
        stream.add(event.encode() if isinstance(event, str) else orjson.dumps(event))
    return form.response(stream.payload(), "m")


def text(words: str) -> Event:
    return {"type": "text", "text": words}


def message(*blocks: Event, **usage: Any) -> Event:
    given = usage or {"input_tokens": 1000, "output_tokens": 1}
    return {"type": "message_start", "message": {"content": list(blocks), "usage": given}}


def block(index: int, given: Event) -> Event:
    return {"type": "content_block_start", "index": index, "content_block": given}


def piece(index: int, words: str) -> Event:
    delta = {"type": "text_delta", "text": words}
    return {"type": "content_block_delta", "index": index, "delta": delta}


def ended(reason: str | None, **usage: Any) -> Event:
    given = usage or {"output_tokens": 10}
    return {"type": "message_delta", "delta": {"stop_reason": reason}, "usage": given}


def said(words: str | None, reason: str | None = None, **usage: Any) -> Event:
    """Return a chunk of Gemini."""
    parts = [] if words is None else [{"text": words}]
    return {
        "candidates": [{"content": {"parts": parts}, "finishReason": reason}],
        **({"usageMetadata": usage} if usage else {}),
    }


STOP: Event = {"type": "message_stop"}
ITEM = {"type": "message", "status": "completed",
        "content": [{"type": "output_text", "text": "Two."}]}  # fmt: skip
CHUNK: Event = {"choices": [{"delta": {"content": "Two."}}]}
FINISH: Event = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
BEGUN: Event = {"type": "response.created", "response": {"model": "m-1", "output": []}}
ITEM_DONE: Event = {"type": "response.output_item.done", "output_index": 0, "item": ITEM}
RUNS: dict[str, tuple[Format, list[Any], list[Any]]] = {
    "Messages": (MESSAGES, [message(), piece(0, "Two.")], [ended("end_turn")]),
    "Messages and chat's word": (
        MESSAGES, [message(), piece(0, "Two.")], [ended("end_turn"), DONE]),
    "Gemini and chat's word": (GENERATE_CONTENT, [said("Two.")], [said("", "STOP"), DONE]),
    "Responses and chat's word": (RESPONSES, [BEGUN, {**ITEM_DONE, "item": {
        **ITEM, "status": "in_progress"}}], [ITEM_DONE, DONE]),
    "Converse": (CONVERSE, [{"contentBlockDelta": {"contentBlockIndex": 0, "delta": {
        "text": "Two."}}}], [{"messageStop": {"stopReason": "end_turn"}}]),
    "chat": (CHAT_COMPLETIONS, [CHUNK], [FINISH]),
}  # fmt: skip


@pytest.mark.parametrize("case", RUNS)
def test_an_answer_is_whole_once_its_own_finish_reason_has_come(case: str) -> None:
    form, begun, end = RUNS[case]
    answer = streamed(form, [*begun, *end])
    assert (answer.content, answer.finish_reason) == ("Two.", FinishReason.STOP)
    stream = form.stream()
    for event in begun:
        stream.add(orjson.dumps(event))
    assert not stream.finished
    with pytest.raises(ModelError, match="broke off"):
        stream.payload()
    stream.add(orjson.dumps(end[0]))
    assert stream.finished or end[-1] == DONE


@pytest.mark.parametrize(
    ("form", "begun"),
    [(MESSAGES, message(text("Two."))), (RESPONSES, BEGUN), (GENERATE_CONTENT, said("Two."))],
)
def test_chats_word_ends_a_stream_and_no_answer(form: Format, begun: Event) -> None:
    stream = form.stream()
    stream.add(orjson.dumps(begun))
    stream.add(DONE.encode())
    assert stream.is_over
    with pytest.raises(ModelError, match="broke off"):
        stream.payload()


FULL: Event = {"promptTokenCount": 100, "candidatesTokenCount": 10, "totalTokenCount": 110}
ZEROS: Event = dict.fromkeys(FULL, 0)
CACHED: Event = {"input_tokens": 1000, "cache_read_input_tokens": 500, "output_tokens": 1}
COUNTS: dict[str, tuple[Format, list[Any], tuple[int, int, int]]] = {
    "Messages, zeros at the end": (MESSAGES, [message(**CACHED), ended(
        "end_turn", input_tokens=0, cache_read_input_tokens=0, output_tokens=10)], (1500, 10, 500)),
    "Messages, zeros at the beginning": (MESSAGES, [
        message(input_tokens=0, output_tokens=0), ended("end_turn", **CACHED | {
            "output_tokens": 10})], (1500, 10, 500)),
    "Messages, counted up": (MESSAGES, [message(**CACHED), ended("end_turn"), ended(
        None, output_tokens=12)], (1500, 12, 500)),
    "Gemini, zeros at the end": (
        GENERATE_CONTENT, [said("a", **FULL), said("", "STOP", **ZEROS)], (100, 10, 0)),
    "Gemini, no counts at the end": (GENERATE_CONTENT, [
        said("a", **FULL), said("", "STOP", trafficType="ON_DEMAND")], (100, 10, 0)),
    "Gemini, zeros at the beginning": (
        GENERATE_CONTENT, [said("a", **ZEROS), said("", "STOP", **FULL)], (100, 10, 0)),
    "Gemini, no usage at the end": (GENERATE_CONTENT, [
        said("a", **FULL), {**said("", "STOP"), "usageMetadata": "none"}], (100, 10, 0)),
}  # fmt: skip


@pytest.mark.parametrize("case", COUNTS)
def test_a_count_that_came_is_not_replaced_by_zero_or_nothing(case: str) -> None:
    form, events, expected = COUNTS[case]
    stream = form.stream()
    for event in events:
        stream.add(orjson.dumps(event))
    for usage in (form.usage(stream.usage), form.response(stream.payload(), "m").usage):
        assert usage is not None
        counts = (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        assert counts == expected


def test_the_audio_of_gemini_is_counted_by_its_last_report() -> None:
    def audio(count: int) -> Event:
        return {**FULL, "candidatesTokensDetails": [{"modality": "AUDIO", "tokenCount": count}]}

    answer = streamed(GENERATE_CONTENT, [said("a", **audio(2)), said("", "STOP", **audio(7))])
    assert answer.usage is not None
    assert answer.usage.audio_tokens == 7


@pytest.mark.parametrize(
    ("form", "events"),
    [
        (MESSAGES, [message(), piece(0, "a"), ended("max_tokens"), ended(None), STOP]),
        (GENERATE_CONTENT, [said("a", "MAX_TOKENS"), said("", None)]),
        (CONVERSE, [{"messageStop": {"stopReason": "max_tokens"}}, {"messageStop": {
            "stopReason": None}}]),
        (CHAT_COMPLETIONS, [CHUNK, {"choices": [{"delta": {}, "finish_reason": "length"}]},
                            CHUNK]),
    ],
)  # fmt: skip
def test_a_finish_reason_that_came_is_not_erased(form: Format, events: list[Any]) -> None:
    assert streamed(form, events).finish_reason is FinishReason.LENGTH


USE = {"type": "tool_use", "id": "t1", "name": "look", "input": {"a": 1}}
STARTED: dict[str, tuple[list[Event], str, int]] = {
    "a text": ([message(text("Two."))], "Two.", 0),
    "a call": ([message(USE)], "", 1),
    "a text that is told once more": (
        [message(text("Two.")), block(0, text("")), piece(0, "Two.")], "Two.", 0),
    "a call that is told once more": ([message(USE), block(0, USE)], "", 1),
    "a block begun there": ([message(text("")), piece(0, "Two.")], "Two.", 0),
    "a call begun there": ([message({**USE, "input": {}}), {
        "type": "content_block_delta", "index": 0,
        "delta": {"type": "input_json_delta", "partial_json": '{"a":1}'}}], "", 1),
    "a text before a call that is told": ([message(text("Two.")), block(1, USE)], "Two.", 1),
    "what is no block": ([{"type": "message_start", "message": {
        "content": ["x", text("Two.")], "usage": {}}}], "Two.", 0),
    "a call that goes on with nothing": ([message(), block(0, USE), {
        "type": "content_block_delta", "index": 0,
        "delta": {"type": "input_json_delta", "partial_json": ""}}], "", 1),
}  # fmt: skip


@pytest.mark.parametrize("case", STARTED)
def test_content_of_a_messages_start_is_taken_once(case: str) -> None:
    events, content, calls = STARTED[case]
    answer = streamed(MESSAGES, [*events, ended("end_turn"), STOP])
    assert answer.content == content
    assert [(one.id, one.arguments) for one in answer.tool_calls or ()] == [
        ("t1", {"a": 1})
    ] * calls


PIXEL = base64.b64encode(b"pixel").decode()


def inline(mime: str, field: str = "inlineData") -> Event:
    return {"candidates": [{"content": {"parts": [{field: {"mimeType": mime, "data": PIXEL}}]},
                            "finishReason": "STOP"}]}  # fmt: skip


def converse(kind: str) -> Event:
    content = [{kind: {"format": "x", "source": {"bytes": PIXEL}}}]
    return {"output": {"message": {"content": content}}, "stopReason": "end_turn"}


MEDIA: dict[str, tuple[Format, Event | list[Any]]] = {
    "an image": (GENERATE_CONTENT, inline("image/png")),
    "audio": (GENERATE_CONTENT, inline("audio/wav")),
    "a video": (GENERATE_CONTENT, inline("video/mp4", "fileData")),
    "a file": (GENERATE_CONTENT, inline("application/pdf", "fileData")),
    "an image in a stream": (GENERATE_CONTENT, [inline("image/png")]),
    "an image of Converse": (CONVERSE, converse("image")),
    "audio of Converse": (CONVERSE, converse("audio")),
    "a video of Converse": (CONVERSE, converse("video")),
    "a document of Converse": (CONVERSE, converse("document")),
    "an image in a stream of Converse": (CONVERSE, [
        {"contentBlockStart": {"contentBlockIndex": 0, "start": {"image": {"format": "png"}}}},
        {"contentBlockDelta": {"contentBlockIndex": 0, "delta": {"image": {"source": {}}}}},
        {"messageStop": {"stopReason": "end_turn"}}]),
    "an image of Messages": (
        MESSAGES, {"content": [{"type": "image", "source": {}}], "stop_reason": "end_turn"}),
    "a file of Messages": (
        MESSAGES, {"content": [{"type": "container_upload"}], "stop_reason": "end_turn"}),
}  # fmt: skip


@pytest.mark.parametrize("case", MEDIA)
def test_what_stands_in_the_place_of_a_text_is_named_and_not_asked_for_again(case: str) -> None:
    form, given = MEDIA[case]
    answer = streamed(form, given) if isinstance(given, list) else form.response(given, "m")
    failure = no_answer(answer, allowed=False)
    assert failure is not None
    assert (failure.code, failure.retryable) == (ModelErrorCode.INVALID_REQUEST, False)
    named = case.partition(" of ")[0].removesuffix(" in a stream")
    assert f"has {named} and" in str(failure)


def test_a_draft_in_the_thoughts_of_gemini_is_no_answer() -> None:
    draft = {"inlineData": {"mimeType": "image/png", "data": PIXEL}, "thought": True}
    payload = {"candidates": [{"content": {"parts": [draft]}, "finishReason": "STOP"}]}
    assert GENERATE_CONTENT.response(payload, "m").unread == ""


def test_a_list_of_geminis_chunks_is_the_answer_of_its_stream() -> None:
    body = b"\n" + orjson.dumps([said("Two "), said("million.", "STOP", **FULL)])
    answer = GENERATE_CONTENT.response(GENERATE_CONTENT.parse(body), "m")
    assert (answer.content, answer.finish_reason) == ("Two million.", FinishReason.STOP)
    assert answer.usage is not None
    failed = GENERATE_CONTENT.parse(b'[{"error":{"code":503,"message":"busy"}}]')
    assert GENERATE_CONTENT.failure(failed) == failed
    for broken in (orjson.dumps([said("Two ")]), b"[", b"[]", b"[1]", b'[],"a":[]'):
        with pytest.raises(ModelError, match="malformed"):
            GENERATE_CONTENT.parse(broken)


def lines(events: list[Event]) -> bytes:
    """Return events whose types are the names of their events alone."""
    return b"".join(
        b"event: %s\ndata: %s\n\n" % (
            event["type"].encode(),
            orjson.dumps({name: one for name, one in event.items() if name != "type"}),
        )
        for event in events
    )  # fmt: skip


COMPLETED = {"type": "response.completed", "response": {"status": "completed", "output": [ITEM]}}


@pytest.mark.parametrize(
    ("form", "events"),
    [
        (MESSAGES, [message(), block(0, text("")), piece(0, "Two."), ended("end_turn"), STOP]),
        (RESPONSES, [BEGUN, ITEM_DONE, COMPLETED]),
    ],
)
def test_an_event_has_its_name_as_its_type(form: Format, events: list[Event]) -> None:
    found = [data.decode() for data in EventLines().feed(lines(events))]
    assert streamed(form, found).content == "Two."


def test_an_event_keeps_the_type_that_it_has() -> None:
    given = b'event: ping\ndata: {"a":1,"type":"mine"}\n\ndata: {"a":1}\n\nevent: "\ndata: {}\n\n'
    typed, unnamed, strange = EventLines().feed(given)
    assert orjson.loads(typed) == {"a": 1, "type": "mine"}
    assert (unnamed, strange) == (b'{"a":1}', b"{}")


def test_calls_that_share_an_index_have_their_own_arguments() -> None:
    """Some proxies give every block the same one."""
    events = [message()]
    for name in ("t1", "t2"):
        delta = {"type": "input_json_delta", "partial_json": orjson.dumps({"a": name}).decode()}
        piece_ = {"type": "content_block_delta", "index": 0, "delta": delta}
        events += [block(0, {**USE, "id": name, "input": {}}), piece_]
    answer = streamed(MESSAGES, [*events, block(1, text("")), piece(1, "Two."), ended("tool_use")])
    assert answer.content == "Two."
    calls = [(one.id, one.arguments) for one in answer.tool_calls or ()]
    assert calls == [("t1", {"a": "t1"}), ("t2", {"a": "t2"})]
