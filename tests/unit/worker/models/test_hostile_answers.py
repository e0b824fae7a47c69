"""Answers that are made to take long: reading them costs time in proportion to their size.

CPU time of this thread is measured, which other load does not change; the same answers took ten
times the bound, or hours.
"""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import orjson
import pytest
from support.servers.raw_model_server import RawModelServer, completion, completion_body, raw

from stepfleet.orchestrator import LLMResponse, Message, ModelRequest, ModelSettings
from stepfleet.orchestrator.errors import ModelError, ModelTimeoutError
from stepfleet.orchestrator.models.services import SERVICES, Api
from stepfleet.worker.models import Models
from stepfleet.worker.models.bodies import MOST_REASONING, MOST_SIGNS, parse_body, read_json
from stepfleet.worker.models.connections import Connections
from stepfleet.worker.models.event_lines import EventLines
from stepfleet.worker.models.http_model import LARGE_ANSWER, HttpModel
from stepfleet.worker.models.openai.chat import CHAT_COMPLETIONS, parse_completion
from stepfleet.worker.models.openai.stream import StreamedCompletion
from stepfleet.worker.models.providers import FORMATS

BOUND_SECONDS = 3.0


@contextmanager
def quickly() -> Iterator[None]:
    begun = time.thread_time()
    yield
    assert time.thread_time() - begun < BOUND_SECONDS


def call_event(**function: Any) -> bytes:
    call = {"index": 0, "id": "c1", "function": function}
    return orjson.dumps({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]})


@pytest.mark.parametrize("ending", [b"", b"\\", b'"', b'"}'], ids=repr)
def test_a_string_of_escaped_quotes_without_an_end_is_refused_in_one_pass(ending: bytes) -> None:
    body = b'{"a":\x01"' + b'\\"' * 60_000 + ending
    with quickly(), pytest.raises(ModelError, match="not JSON"):
        parse_body(body)


def test_strings_with_escapes_and_control_characters_are_still_mended() -> None:
    assert read_json(b'{"a\t": "x\n\\"y\\\\", "b": "\x01"}') == {"a\t": 'x\n"y\\', "b": "\x01"}


def test_pieces_behind_long_arguments_do_not_look_at_them_again() -> None:
    completion = StreamedCompletion()
    piece = call_event(name="look", arguments="")
    with quickly():
        completion.add(call_event(name="look", arguments="{}" + " " * 8_000_000))
        for _ in range(10_000):
            completion.add(piece)


def test_a_name_does_not_grow_with_each_of_its_pieces() -> None:
    completion = StreamedCompletion()
    for _ in range(2_000):
        completion.add(call_event(name="b" * 1_000))
        completion.add(call_event(name="a"))
    completion.add(orjson.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}))
    payload = completion.payload()
    function = payload["choices"][0]["message"]["tool_calls"][0]["function"]
    assert 200 < len(function["name"]) < 2_000
    (call,) = parse_completion(payload, "asked").tool_calls or ()
    assert call.error is not None


def test_an_answer_of_very_many_values_is_refused_before_they_are_made() -> None:
    with pytest.raises(ModelError, match="brackets, commas and colons"):
        parse_body(b"[" + b"[]," * MOST_SIGNS + b"1]")


def test_a_long_text_is_no_answer_of_many_values() -> None:
    text = "a line of text, and one more\n" * (2 * 1024 * 1024 // 29)
    assert parse_body(orjson.dumps({"text": text})) == {"text": text}


@pytest.mark.parametrize("name", ["", "m" * 1_000_000, 7, None], ids=lambda one: repr(one)[:9])
def test_what_is_no_model_s_name_is_not_kept_with_each_step(name: Any) -> None:
    assert parse_completion(completion_body() | {"model": name}, "asked").model == "asked"


BLANK = {"type": "text", "text": " " * 20}
WHOLE: dict[str, tuple[Api, Any]] = {
    "Messages": (Api.MESSAGES, lambda many: {
        "content": [BLANK, {"type": "thinking", "thinking": "x", "signature": "s"}] * many}),
    "a paused turn": (Api.MESSAGES, lambda many: {
        "content": [BLANK, {"type": "server_tool_use"}] * many, "stop_reason": "pause_turn"}),
    "Converse": (Api.CONVERSE, lambda many: {"output": {"message": {"content": [
        {"text": " " * 20}, {"reasoningContent": {"reasoningText": {"signature": "s"}}}] * many}}}),
    "Gemini": (Api.GENERATE_CONTENT, lambda many: {"candidates": [{"content": {
        "parts": [{"text": "", "thoughtSignature": "s"}] * many}}]}),
    "Responses": (Api.RESPONSES, lambda many: {"output": [
        {"type": "message", "content": [{"type": "output_text", "text": ""}]},
        {"type": "reasoning", "encrypted_content": "z"}] * many}),
    "chat": (Api.CHAT, lambda many: {"choices": [{"message": {"content": [
        {"type": "text", "text": ""}, {"type": "thinking", "thinking": "x"}] * many}}]}),
}  # fmt: skip


@pytest.mark.parametrize("case", WHOLE)
def test_an_answer_of_very_many_blocks_is_read_in_time_linear_in_its_size(case: str) -> None:
    api, made = WHOLE[case]
    form, body = FORMATS[api], orjson.dumps(made(20_000))
    with quickly():
        answer = form.response(form.parse(body), "asked")
    assert len(answer.reasoning) <= MOST_REASONING


STREAMS: dict[str, tuple[Api, Any]] = {
    "counts": (Api.MESSAGES, lambda at: {
        "type": "message_delta", "delta": {f"a{at}": 1},
        "usage": {f"k{at * 7 + each}": 1 for each in range(7)}}),
    "blocks": (Api.MESSAGES, lambda at: {
        "type": "content_block_start", "index": at, "content_block": BLANK}),
    "texts": (Api.CONVERSE, lambda at: {
        "contentBlockDelta": {"contentBlockIndex": at, "delta": {"text": " "}}}),
    "parts": (Api.GENERATE_CONTENT, lambda at: {"responseId": f"{at}", "candidates": [{"content": {
        "parts": [{"text": "", "thoughtSignature": "s"}]}, "finishReason": "STOP"}]}),
    "items": (Api.RESPONSES, lambda at: {
        "type": "response.output_item.done", "output_index": at, "item": {"type": "message"}}),
    "choices": (Api.CHAT, lambda at: {"choices": [{"index": at, "finish_reason": "stop", "delta": {
        "reasoning_details": [{"type": "a", "index": at}]}}]}),
}  # fmt: skip
ENDS: dict[Api, dict[str, Any]] = {
    Api.MESSAGES: {"type": "message_stop"},
    Api.CONVERSE: {"messageStop": {"stopReason": "end_turn"}},
    Api.RESPONSES: {"type": "response.completed", "response": {"status": "completed"}},
}


@pytest.mark.parametrize("case", STREAMS)
def test_a_stream_of_very_many_events_is_read_in_time_linear_in_its_size(case: str) -> None:
    api, made = STREAMS[case]
    form = FORMATS[api]
    answer = form.stream()
    events = [orjson.dumps(made(at)) for at in range(20_000)]
    if api in ENDS:
        events.append(orjson.dumps(ENDS[api]))
    with quickly():
        for event in events:
            answer.add(event)
        form.response(answer.payload(), "asked")


@pytest.mark.parametrize(
    "rest", [b": a comment\n", b"no field\n", b"event: x\n", b"\r", b"error: no\r", b"data:\n\n"]
)
def test_lines_behind_a_long_one_do_not_look_at_it_again(rest: bytes) -> None:
    body = b'data: {"a":"' + b"x" * 4_000_000 + b'"}\n' + rest * 50_000
    lines = EventLines()
    with quickly():
        for first in range(0, len(body), 16_384):
            lines.feed(body[first : first + 16_384])
        lines.end()


async def test_an_answer_that_takes_long_to_read_is_given_up_at_the_calls_deadline() -> None:
    given_up = threading.Event()

    def slow(payload: dict[str, Any], model: str) -> LLMResponse:
        given_up.wait(30)
        return parse_completion(payload, model)

    async with RawModelServer().running() as server:
        server.answers(completion("x" * LARGE_ANSWER))
        connections = Connections()
        form = replace(CHAT_COMPLETIONS, response=slow)
        model = HttpModel(SERVICES["openai"], form, connections, environment={})
        settings = ModelSettings(base_url=server.base_url, timeout=0.5)
        request = ModelRequest(model="m", messages=(Message.user("hi"),), settings=settings)
        with pytest.raises(ModelTimeoutError) as raised:
            await model.generate(request)
        given_up.set()
        await connections.aclose()
    assert raised.value.usage is not None  # it was reported: the ledger gets what it has cost


async def test_a_stream_of_thousands_of_small_events_gives_others_their_turn() -> None:
    piece = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    end = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    read = 0
    runs: list[int] = []

    def take(_: str) -> None:
        nonlocal read
        read += 1

    async def others() -> None:
        nonlocal read
        while True:
            runs.append(read)
            read = 0
            await asyncio.sleep(0)

    async with RawModelServer().running() as server:
        server.answers(raw(head + piece * 40_000 + end))
        models = Models(environment={"OPENAI_API_KEY": "k"})
        settings = ModelSettings(base_url=server.base_url, stream=True)
        request = ModelRequest(model="m", messages=(Message.user("hi"),), settings=settings)
        beside = asyncio.create_task(others())
        model, _ = models.resolve("openai:m")
        assert isinstance(model, HttpModel)
        answer = await model.generate_streaming(request, take)
        beside.cancel()
        await models.aclose()
    assert len(answer.content) == sum(runs) + read == 40_000
    assert max(runs) < 1000
