"""Compatible servers differ in details: their answers are read as if they did not."""

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from support.runs.opened_runs import opened_run
from support.runs.scripted_steps import call, requests
from support.runs.tools import look
from support.servers.raw_model_server import (
    RawModelServer,
    completion_body,
    events,
    raw,
    reply,
)

from stepfleet.orchestrator import (
    FinishReason,
    LLMResponse,
    Message,
    ModelRequest,
    ModelSettings,
    StopReason,
    ToolSpec,
    UsageStats,
)
from stepfleet.orchestrator.memory.pruning import estimate_tokens
from stepfleet.worker.attempt.usage import counted
from stepfleet.worker.models import Models
from stepfleet.worker.models.bodies import partial_usage
from stepfleet.worker.testing.scenario import Quirk, Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

CALLS = (
    ToolCallReply("look_up", {"what": "a lamp", "deep": {"er": [1, 2]}}),
    ToolCallReply("look_up", {"what": "a chair"}),
    ToolCallReply("stock_of_a_place", {}),
)
TEXT = "first line\n\tsecond \\ line"


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with ModelServer() as running:
        yield running


@pytest.fixture
async def ask(server: ModelServer) -> AsyncIterator[Callable[..., Any]]:
    models = Models(environment={})

    async def answer(said: Reply, *, stream: bool) -> LLMResponse:
        server.follow(lambda _: said)
        settings = ModelSettings(base_url=server.url, stream=stream)
        request = ModelRequest(model="openai:m", messages=(Message.user("hi"),), settings=settings)
        return await models.generate(request)

    yield answer
    await models.aclose()


@pytest.mark.parametrize("quirk", list(Quirk))
@pytest.mark.parametrize("stream", [False, True])
async def test_calls_are_read_alike_whatever_the_servers_habits(
    ask: Callable[..., Any], quirk: Quirk, stream: bool
) -> None:
    """LLM-05, STRM-07: names are not doubled, calls not joined, arguments whole."""
    piece = 10_000 if quirk is Quirk.ARGUMENTS_OBJECT else 5
    said = Reply("I look.", tool_calls=CALLS, piece=piece, quirks=(quirk,))
    response = await ask(said, stream=stream)
    calls = [(call.name, call.arguments, call.error) for call in response.tool_calls or ()]
    assert calls == [(call.name, call.arguments, None) for call in CALLS]
    assert len({call.id for call in response.tool_calls or ()}) == len(CALLS)
    assert response.content == "I look."
    assert response.finish_reason is FinishReason.TOOL_CALLS


@pytest.mark.parametrize("quirk", list(Quirk))
@pytest.mark.parametrize("stream", [False, True])
async def test_text_is_read_alike_whatever_the_servers_habits(
    ask: Callable[..., Any], quirk: Quirk, stream: bool
) -> None:
    """STRM-07: line breaks and tabs included."""
    response = await ask(Reply(TEXT, quirks=(quirk,)), stream=stream)
    assert response.content == TEXT
    assert response.usage is not None


@pytest.mark.parametrize("stream", [False, True])
async def test_control_characters_in_arguments_are_meant_as_they_stand(
    ask: Callable[..., Any], stream: bool
) -> None:
    """Unescaped in the arguments' own text, and in the body around it."""
    call = ToolCallReply("note", '{"text": "one\n\ttwo"}')
    said = Reply(tool_calls=(call,), quirks=(Quirk.RAW_CONTROL,))
    response = await ask(said, stream=stream)
    ((name, arguments),) = [(one.name, one.arguments) for one in response.tool_calls or ()]
    assert (name, arguments) == ("note", {"text": "one\n\ttwo"})


@pytest.mark.parametrize(
    ("deltas", "name", "arguments"),
    [
        ([{"name": "look_up", "arguments": ""}, {"name": "look_up", "arguments": "{}"}],
         "look_up", {}),
        ([{"name": "look"}, {"name": "look_up", "arguments": "{}"}], "look_up", {}),
        ([{"name": "look"}, {"name": "_up", "arguments": "{}"}], "look_up", {}),
        ([{"name": "", "arguments": ""}, {"name": "look_up", "arguments": "{}"}], "look_up", {}),
        ([{"name": None, "arguments": '{"a":'}, {"name": "look_up", "arguments": "1}"}],
         "look_up", {"a": 1}),
        ([{"name": "look_up", "arguments": '{"a":1}'}, {"name": "look_up", "arguments": '{"a":1}'}],
         "look_up", {"a": 1}),
    ],
)  # fmt: skip
async def test_a_streamed_name_is_joined_only_where_it_comes_in_pieces(
    deltas: list[dict[str, Any]], name: str, arguments: dict[str, Any]
) -> None:
    """STRM-07"""
    chunks = [
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "id": "c1", "function": one}]}}]}
        for one in deltas
    ]
    end = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
    async with RawModelServer().running() as server:
        server.answers(events(*chunks, end, {"choices": None, "usage": None}))
        response = await _generate(server)
    (call,) = response.tool_calls or ()
    assert (call.name, call.arguments, call.id) == (name, arguments, "c1")


async def test_a_line_break_that_cuts_an_event_is_part_of_its_text() -> None:
    """STRM-07"""
    stream = (
        b'data: {"choices":[{"delta":{"content":"one\n\ttwo"},"finish_reason":"stop"}]}\n\n'
        b"data: [DONE]\n\n"
    )
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    async with RawModelServer().running() as server:
        server.answers(raw(head + stream))
        response = await _generate(server)
    assert response.content == "one\n\ttwo"


async def _generate(
    server: RawModelServer, *, stream: bool = True, tools: tuple[ToolSpec, ...] = ()
) -> LLMResponse:
    models = Models(environment={})
    settings = ModelSettings(base_url=server.base_url, stream=stream)
    try:
        return await models.generate(
            ModelRequest(
                model="openai:m", messages=(Message.user("hi"),), settings=settings, tools=tools
            )
        )
    finally:
        await models.aclose()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("functions.look", "look"),
        ("look<|channel|>commentary", "look"),
        ("functions.look:0", "look"),
        ("functions.own", "functions.own"),
        ("functions.other", "functions.other"),
        ("<|channel|>", "<|channel|>"),
        ("look:at", "look:at"),
    ],
)
async def test_a_name_with_marks_of_its_model_is_that_of_the_tool_on_offer(
    given: str, expected: str
) -> None:
    body = completion_body(None, tool_calls=[{"function": {"name": given, "arguments": "{}"}}])
    offered = tuple(ToolSpec(name=name, description="") for name in ("look", "functions.own"))
    async with RawModelServer().running() as server:
        server.answers(reply(200, body))
        (found,) = (await _generate(server, stream=False, tools=offered)).tool_calls or ()
    assert found.name == expected


ESTIMATE = 4, 1
"""Tokens of the request and of the answer, as they are estimated here."""


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({}, ESTIMATE),
        ({"prompt_tokens": 70}, (70, ESTIMATE[1])),
        ({"prompt_tokens": 70, "completion_tokens": None, "total_tokens": 70}, (70, ESTIMATE[1])),
        ({"completion_tokens": 70}, (ESTIMATE[0], 70)),
        ({"total_tokens": 70}, (ESTIMATE[0], 70 - ESTIMATE[0])),
        ({"total_tokens": 3}, (3 - ESTIMATE[1], ESTIMATE[1])),
        ({"total_tokens": "many"}, ESTIMATE),
        ({"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}, ESTIMATE),
        ({"prompt_tokens": 70, "completion_tokens": 0, "total_tokens": 70}, (70, ESTIMATE[1])),
        ({"prompt_tokens": 0, "completion_tokens": 70}, (ESTIMATE[0], 70)),
        ({"prompt_tokens": 70, "completion_tokens": -1, "total_tokens": 69}, (70, ESTIMATE[1])),
    ],
)
async def test_counts_that_are_stated_stay_and_others_are_estimated(
    usage: dict[str, Any], expected: tuple[int, int], *, is_stream: bool
) -> None:
    """LLM-12"""
    body = {**completion_body("fine then"), "usage": usage}
    choice = {"delta": {"content": "fine then"}, "finish_reason": "stop"}
    async with RawModelServer().running() as server:
        server.answers(
            events({"choices": [choice], "usage": usage}) if is_stream else reply(200, body)
        )
        response = await _generate(server, stream=is_stream)
    request = ModelRequest(model="openai:m", messages=(Message.user("hi"),))
    found = counted(response, request, estimate_tokens)
    assert found.usage is not None
    assert found.usage_estimated
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == expected
    assert found.usage.total_tokens == sum(expected)
    assert "partial_usage" not in found.to_json()


def test_reasoning_that_is_shown_is_output_that_is_estimated() -> None:
    request = ModelRequest(model="vllm:m", messages=(Message.user("hi"),))
    plain, thought = (
        counted(LLMResponse(content="fine", reasoning_text=text), request, estimate_tokens).usage
        for text in ("", "so be it then, it is fine")
    )
    assert plain
    assert thought
    assert thought.completion_tokens > plain.completion_tokens


@pytest.mark.parametrize(
    ("usage", "prompt"),
    [
        ({"input_tokens": 5, "cache_read_input_tokens": 60, "cache_creation_input_tokens": 1}, 66),
        ({"inputTokens": 5, "cacheReadInputTokens": 60}, 65),
        ({"promptTokenCount": 5}, 5),
        ({"prompt_tokens": 70, "cache_read_input_tokens": 60}, 70),
    ],
)
def test_a_prompt_that_is_stated_alone_has_its_cache(usage: dict[str, int], prompt: int) -> None:
    assert partial_usage(usage) == UsageStats(prompt_tokens=prompt)


async def _said(request: ModelRequest) -> LLMResponse:
    asked = call(("look", {"what": f"{len(request.messages)} things"}))
    return asked.model_copy(update={"usage": None})


async def test_a_token_limit_binds_where_no_usage_is_reported(redis_url: str) -> None:
    """LLM-12, CONT-16: what is counted here stands in for it, and is marked."""
    async with opened_run(redis_url, _said, tools=(look,), token_limit=100, max_steps=50) as (
        desk,
        hands,
        run_id,
    ):
        await hands.finish(run_id, most=60)
        result = (await desk.stored(run_id)).result()
    assert result.stop_reason is StopReason.TOKEN_LIMIT
    assert result.usage.total_tokens >= 100
    assert result.usage_estimated
    assert not any(step.usage_reported for step in result.steps)
    assert "(estimated)" in result.explain()
    assert len(requests(hands)) == result.steps_used


async def test_a_budget_binds_where_no_usage_is_reported(redis_url: str) -> None:
    """The scripted prices are a thousandth of a dollar per token."""
    async with opened_run(redis_url, _said, tools=(look,), budget_usd=0.2, max_steps=50) as (
        desk,
        hands,
        run_id,
    ):
        await hands.finish(run_id, most=60)
        result = (await desk.stored(run_id)).result()
    assert result.stop_reason is StopReason.GUARD
    assert result.cost_usd >= 0.2
