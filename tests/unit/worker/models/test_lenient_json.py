"""A paid answer is read though its JSON is not the standard's, and what was wrong is named."""

import logging
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from support.servers.raw_model_server import RawModelServer, completion_body, raw

from stepfleet.orchestrator import LLMResponse, Message, ModelRequest, ModelSettings
from stepfleet.orchestrator.errors import ModelError
from stepfleet.worker.attempt.sanitize import storable
from stepfleet.worker.models import Models, bodies
from stepfleet.worker.models.anthropic import parse_message
from stepfleet.worker.models.bedrock.converse import parse_converse
from stepfleet.worker.models.bodies import parse_body, parse_event
from stepfleet.worker.models.google import parse_content
from stepfleet.worker.models.openai.chat import parse_completion
from stepfleet.worker.models.responses import parse_response
from stepfleet.worker.toolbox.failure_log import Equals

TEXT = "said so"
BODIES: dict[str, tuple[Callable[[dict[str, Any], str], LLMResponse], dict[str, Any]]] = {
    "chat": (parse_completion, completion_body(TEXT)),
    "messages": (
        parse_message,
        {"content": [{"type": "text", "text": TEXT}], "stop_reason": "end_turn"},
    ),
    "converse": (
        parse_converse,
        {
            "output": {"message": {"role": "assistant", "content": [{"text": TEXT}]}},
            "stopReason": "end_turn",
        },
    ),
    "gemini": (
        parse_content,
        {"candidates": [{"content": {"parts": [{"text": TEXT}]}, "finishReason": "STOP"}]},
    ),
    "responses": (
        parse_response,
        {
            "status": "completed",
            "output": [{"type": "message", "content": [{"type": "output_text", "text": TEXT}]}],
        },
    ),
}
ODD = {
    "NaN": (b"NaN", "NaN"),
    "an infinity": (b'{"logprob": -Infinity}', "-Infinity"),
    "a lone surrogate": (b'"\\ud83d"', "unexpected end of hex escape"),
    "a byte that is no UTF-8": (b'"\xff"', "invalid unicode code point"),
    "a number of 5,000 digits": (b"1" * 5_000, "number"),
    "a control character": (b'"\x01"', "control character"),
    "300 levels": (b"[" * 300 + b"]" * 300, "recursion limit"),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("protocol", BODIES)
def test_an_odd_value_beside_the_answer_leaves_the_answer(
    protocol: str,
    odd: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line names it."""
    monkeypatch.setattr(bodies, "_equals", Equals())
    parse, body = BODIES[protocol]
    value, named = ODD[odd]
    data = orjson.dumps({"x_metric": "?", **body}).replace(b'"?"', value)
    with caplog.at_level(logging.WARNING):
        answer = storable(parse(parse_body(data), "asked"), parsed=True)
    assert answer.content == TEXT
    assert LLMResponse.from_json(answer.to_json()).content == TEXT
    (line,) = caplog.records
    assert f"not standard JSON ({named}" in line.message


@pytest.mark.parametrize("protocol", BODIES)
def test_a_lone_surrogate_in_the_text_is_shown_as_its_escape(protocol: str) -> None:
    parse, body = BODIES[protocol]
    data = orjson.dumps(body).replace(TEXT.encode(), b"a \\ud83d b")
    answer = storable(parse(parse_body(data), "asked"), parsed=True)
    assert answer.content == "a \\ud83d b"


def test_what_is_odd_is_named_a_few_times_in_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            parse_event(b'{"rate": Infinity}')
    assert 0 < len(caplog.records) <= 5
    assert "Infinity" in caplog.records[0].message


def test_whole_numbers_in_an_answer_are_exact() -> None:
    call = {"type": "tool_use", "id": "a", "name": "pay", "input": {"wei": 2**64, "at": [10**40]}}
    body = b'{"content": [%s], "stop_reason": "tool_use"}' % str(call).replace("'", '"').encode()
    (made,) = parse_message(parse_body(body), "asked").tool_calls or ()
    assert made.arguments == {"wei": 2**64, "at": [10**40]}
    assert all(type(one) is int for one in [made.arguments["wei"], *made.arguments["at"]])


def test_nan_in_arguments_is_an_error_of_that_call_alone() -> None:
    body = b'{"content": [{"type": "tool_use", "id": "a", "name": "pay", "input": {"usd": NaN}}]}'
    (made,) = parse_message(parse_body(body), "asked").tool_calls or ()
    assert made.error is not None
    assert "NaN" in made.error


@pytest.mark.parametrize("data", [b"", b"{", b'{"a": nan}', b"{} {}", b"\xff", b"[" * 100_000])
def test_what_is_no_json_is_still_refused(data: bytes) -> None:
    with pytest.raises(ModelError, match="not JSON"):
        parse_body(data)


@pytest.mark.parametrize("stream", [False, True])
async def test_halves_of_a_character_that_come_apart_are_joined(*, stream: bool) -> None:
    """Some servers cut a text between the two halves of an emoji."""
    said: list[str] = []
    pieces = (b'"a \\ud83d"', b'"\\ude00 b"')
    if stream:
        deltas = b"".join(b'data: {"choices":[{"delta":{"content":%s}}]}\n\n' % p for p in pieces)
        end = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
        kind, body = b"text/event-stream", deltas + end
    else:
        parts = [{"type": "text", "text": "?0"}, {"type": "text", "text": "?1"}]
        body = orjson.dumps(completion_body() | {"choices": [{"message": {"content": parts}}]})
        body = body.replace(b'"?0"', pieces[0]).replace(b'"?1"', pieces[1])
        kind = b"application/json"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nConnection: close\r\n\r\n" % kind
    async with RawModelServer().running() as server:
        server.answers(raw(head + body))
        models = Models(environment={"OPENAI_API_KEY": "k"})
        settings = ModelSettings(base_url=server.base_url, stream=stream)
        request = ModelRequest(model="openai:m", messages=(Message.user("hi"),), settings=settings)
        answer = await models.generate(request, on_text=said.append)
        await models.aclose()
    assert answer.content == "a \N{GRINNING FACE} b"
    assert all(one.encode() for one in said)
