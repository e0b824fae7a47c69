"""Answers that are made to take long: reading them costs time in proportion to their size.

CPU time of this thread is measured, which other load does not change; the same answers took ten
times the bound, or hours.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson
import pytest
from support.servers.raw_model_server import completion_body

from stepfleet.orchestrator.errors import ModelError
from stepfleet.worker.models.bodies import parse_body
from stepfleet.worker.models.lenient_json import MENDED_BYTES, MOST_SIGNS, read_json
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
    text = "a line of text, and one more\n" * (MENDED_BYTES // 29)
    assert parse_body(orjson.dumps({"text": text})) == {"text": text}


@pytest.mark.parametrize("name", ["", "m" * 1_000_000, 7, None], ids=lambda one: repr(one)[:9])
def test_what_is_no_model_s_name_is_not_kept_with_each_step(name: Any) -> None:
    assert parse_completion(completion_body() | {"model": name}, "asked").model == "asked"
