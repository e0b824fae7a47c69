"""Answers that are made to take long: reading them costs time in proportion to their size.

CPU time of this thread is measured, which other load does not change; the same answers took ten
times the bound, or hours.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson
import pytest
from support.servers.raw_model_server import RawModelServer, completion_body, raw

from stepfleet.orchestrator import Message, ModelRequest, ModelSettings
from stepfleet.orchestrator.errors import ModelError
from stepfleet.worker.models import Models
from stepfleet.worker.models.bodies import parse_body
from stepfleet.worker.models.http_model import HttpModel
from stepfleet.worker.models.lenient_json import MOST_SIGNS, read_json
from stepfleet.worker.models.openai.answer import parse_completion
from stepfleet.worker.models.openai.stream import StreamedCompletion

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
