"""The adapter over real connections to a server that behaves in every way a server can."""

import asyncio
import gzip
import os
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
from support.deadlines import until
from support.servers.raw_model_server import (
    RawModelServer,
    Script,
    completion,
    completion_body,
    endless,
    events,
    kept_events,
    raw,
    reply,
    silence,
)

from stepfleet.orchestrator import (
    ErrorType,
    Message,
    ModelRequest,
    ModelSettings,
    ToolCall,
    ToolSpec,
)
from stepfleet.orchestrator.errors import (
    ContextWindowError,
    ModelError,
    ModelTimeoutError,
    RateLimitError,
)
from stepfleet.worker.models import Models, generate_sync
from stepfleet.worker.models.connections import Connections
from stepfleet.worker.models.providers import service_model

KEY = "test-secret-key"
LIMIT = 256 * 1024
TOOL_CALL = {"id": "c1", "type": "function", "function": {"name": "t", "arguments": '{"a": 1}'}}


@pytest.fixture
async def server() -> AsyncIterator[RawModelServer]:
    async with RawModelServer().running() as running:
        yield running


@pytest.fixture
async def models() -> AsyncIterator[Models]:
    models = Models(environment={"OPENAI_API_KEY": KEY}, response_limit=LIMIT)
    yield models
    await models.aclose()


def question(server: RawModelServer, **settings: Any) -> ModelRequest:
    return ModelRequest(
        model="openai:gpt-4o-mini",
        messages=(Message.user("hi"),),
        settings=ModelSettings(base_url=server.base_url, **settings),
    )


async def failure(models: Models, request: ModelRequest) -> ModelError:
    with pytest.raises(ModelError) as raised:
        await models.generate(request)
    assert KEY not in str(raised.value)
    assert raised.value.__cause__ is None
    return raised.value


def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "chatcmpl-1", "model": "gpt-4o-mini-2024-07-18", "choices": [choice]}


async def test_a_request_carries_model_messages_settings_and_key(
    server: RawModelServer, models: Models
) -> None:
    """LLM-19: model, base URL and output limit as the agent sets them."""
    server.answers(completion())
    await models.generate(question(server, max_tokens=7))
    (received,) = server.received
    assert received.path == "/v1/chat/completions"
    assert received.headers["authorization"] == f"Bearer {KEY}"
    assert received.body == {
        "model": "gpt-4o-mini",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 7,
    }


async def test_a_conversation_with_tools_arrives_without_its_metadata(
    server: RawModelServer, models: Models
) -> None:
    """MSG-17, LLM-10: as the server sees it."""
    server.answers(completion())
    call = ToolCall(id="c1", name="t", arguments={"a": 1})
    answer = Message.tool(call, "2").model_copy(update={"metadata": {"result": "SECRET-META"}})
    request = question(server).model_copy(
        update={
            "messages": (Message.user("hi"), Message.assistant("", (call,)), answer),
            "tools": (ToolSpec(name="t"),),
            "tool_choice": "any",
        }
    )
    await models.generate(request)
    (received,) = server.received
    assert b"SECRET-META" not in received.raw
    assert received.body["tool_choice"] == "required"
    assert [message["role"] for message in received.body["messages"]] == [
        "user",
        "assistant",
        "tool",
    ]


async def test_one_call_makes_one_request(server: RawModelServer, models: Models) -> None:
    """LLM-08: the adapter itself never tries again."""
    server.answers(reply(503, b""))
    await failure(models, question(server))
    assert len(server.received) == 1


async def test_a_tool_call_and_its_usage_come_back(server: RawModelServer, models: Models) -> None:
    server.answers(completion(None, tool_calls=[TOOL_CALL]))
    response = await models.generate(question(server))
    assert response.tool_calls == (ToolCall(id="c1", name="t", arguments={"a": 1}),)
    assert response.usage is not None
    assert response.usage.total_tokens == 15


async def test_an_answer_without_usage_succeeds_and_shows_it(
    server: RawModelServer, models: Models
) -> None:
    """LLM-12: usage None."""
    server.answers(reply(200, completion_body() | {"usage": None}))
    assert (await models.generate(question(server))).usage is None


async def test_a_streamed_call_has_the_same_result(server: RawModelServer, models: Models) -> None:
    """STRM-07, STRM-08: text, calls, usage."""
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    calls = [{"index": 0, "id": "c1", "function": {"name": "t", "arguments": '{"a"'}}]
    more = [{"index": 0, "function": {"arguments": ": 1}"}}]
    server.answers(
        completion("I look", tool_calls=[TOOL_CALL]),
        events(
            chunk(role="assistant", content="I "),
            chunk(content="look"),
            chunk(tool_calls=calls),
            chunk(tool_calls=more),
            chunk("tool_calls"),
            {"choices": [], "usage": usage},
        ),
    )
    pieces: list[str] = []
    whole = await models.generate(question(server))
    streamed = await models.generate(question(server, stream=True), on_text=pieces.append)
    assert streamed.to_dict() == whole.to_dict()
    assert pieces == ["I ", "look"]
    assert server.received[1].body["stream_options"] == {"include_usage": True}


async def test_a_server_that_does_not_stream_is_understood_and_its_text_comes_at_once(
    server: RawModelServer, models: Models
) -> None:
    server.answers(completion("hello"))
    pieces: list[str] = []
    answer = await models.generate(question(server, stream=True), on_text=pieces.append)
    assert (pieces, answer.content) == (["hello"], "hello")


async def test_a_compressed_answer_is_read(server: RawModelServer, models: Models) -> None:
    data = gzip.compress(orjson.dumps(completion_body("hello")))
    server.answers(reply(200, data, {"Content-Encoding": "gzip"}))
    assert (await models.generate(question(server))).content == "hello"


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(raw(b""), id="closed before the answer"),
        pytest.param(raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"), id="body cut off"),
        pytest.param(raw(b"SSH-2.0-what\r\n\r\n"), id="not HTTP"),
        pytest.param(
            raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n"), id="bad chunks"
        ),
        pytest.param(reply(200, b"<html>hello</html>"), id="not JSON"),
        pytest.param(reply(200, b"x", {"Content-Encoding": "gzip"}), id="not gzip"),
        pytest.param(reply(200, b"[" * 50_000 + b"]" * 50_000), id="too deep"),
        pytest.param(reply(200, {"choices": []}), id="no choices"),
        pytest.param(reply(200, {"choices": [{"index": 0}]}), id="no message"),
        pytest.param(reply(200, {"error": {"message": "upstream died"}}), id="error in a 200"),
        pytest.param(reply(204, b""), id="no content"),
        pytest.param(reply(500, {"error": {"message": "oops"}}), id="500"),
        pytest.param(reply(408, b""), id="408"),
        pytest.param(events(chunk(content="half"), done=False), id="stream cut off"),
        pytest.param(events({"error": {"message": "overloaded"}}), id="error event"),
        pytest.param(
            raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {x\n\n"),
            id="broken event",
        ),
    ],
)
async def test_trouble_on_the_way_is_a_transient_model_error(
    server: RawModelServer, models: Models, script: Script
) -> None:
    """LLM-06, LLM-17: never a crash, always worth another attempt."""
    server.answers(script)
    error = await failure(models, question(server, timeout=60))
    assert type(error) is ModelError
    assert error.retryable


async def test_a_server_that_is_not_there_is_a_transient_model_error(models: Models) -> None:
    """LLM-06: connection errors."""
    async with RawModelServer().running() as gone:
        request = question(gone)
    error = await failure(models, request)
    assert error.retryable
    assert "127.0.0.1" in str(error)


async def test_a_rate_limit_tells_how_long_to_wait(server: RawModelServer, models: Models) -> None:
    """LLM-06: 429."""
    server.answers(reply(429, {"error": {"message": "slow"}}, {"Retry-After": "3"}))
    error = await failure(models, question(server))
    assert isinstance(error, RateLimitError)
    assert error.retry_after == 3


async def test_a_conversation_that_is_too_long_tells_the_window(
    server: RawModelServer, models: Models
) -> None:
    """LLM-06: context_length_exceeded."""
    message = "This model's maximum context length is 8192 tokens."
    body = {"error": {"message": message, "code": "context_length_exceeded"}}
    server.answers(reply(400, body))
    error = await failure(models, question(server))
    assert isinstance(error, ContextWindowError)
    assert error.limit == 8192


async def test_a_refused_key_is_permanent_and_not_repeated(
    server: RawModelServer, models: Models
) -> None:
    """LLM-06: 401, with the echoed key cut out."""
    server.answers(reply(401, {"error": {"message": f"Incorrect API key provided: {KEY}"}}))
    error = await failure(models, question(server))
    assert not error.retryable


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(silence(), id="no answer"),
        pytest.param(raw(b"HTTP/1.1 200 OK\r\n", close=False), id="half a head"),
        pytest.param(raw(b"HTTP/1.1 200 OK\r\n\r\n{", close=False), id="half a body"),
        pytest.param(raw(b"HTTP/1.1 500 No\r\n\r\n{", close=False), id="half an error"),
        pytest.param(
            raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", close=False),
            id="half a stream",
        ),
    ],
)
async def test_the_timeout_bounds_the_whole_call(
    server: RawModelServer, models: Models, script: Script
) -> None:
    """LLM-09: wherever the server stops, the call ends with error type timeout."""
    server.answers(script)
    error = await failure(models, question(server, timeout=0.2))
    assert isinstance(error, ModelTimeoutError)
    assert error.type is ErrorType.TIMEOUT
    assert "settings.timeout" in str(error)


async def test_the_adapter_alone_keeps_the_timeout_too(
    server: RawModelServer, models: Models
) -> None:
    """LLM-09: without the worker's guard around it."""
    llm, _ = models.resolve("openai:m")
    server.answers(silence())
    with pytest.raises(ModelTimeoutError, match=r"settings\.timeout"):
        await llm.generate(question(server, timeout=0.2))


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_body_that_never_ends_is_bounded_by_its_size(
    server: RawModelServer, models: Models, *, streamed: bool
) -> None:
    server.answers(endless())
    error = await failure(models, question(server, stream=streamed, timeout=60))
    assert f"limit of {LIMIT}" in str(error)
    assert not error.retryable


async def test_an_error_body_that_never_ends_is_bounded(
    server: RawModelServer, models: Models
) -> None:
    server.answers(raw(b"HTTP/1.1 400 Bad\r\n\r\n" + b"y" * 1_000_000, close=False))
    error = await failure(models, question(server, timeout=60))
    assert "answered 400: yyy" in str(error)
    assert len(str(error)) < 1000


async def test_connections_are_kept_and_shared(server: RawModelServer, models: Models) -> None:
    server.answers(completion())
    for _ in range(5):
        await models.generate(question(server))
    assert server.connections == 1


async def test_connections_of_streamed_calls_are_kept_too(
    server: RawModelServer, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepfleet.worker.models.http_model._READ_OUT_SECONDS", 60.0)
    server.answers(kept_events(chunk(content="hello"), chunk("stop")))
    for _ in range(5):
        await models.generate(question(server, stream=True))
    assert server.connections == 1


async def test_a_stream_that_stays_open_after_its_end_is_left(
    server: RawModelServer, models: Models
) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    event = orjson.dumps(chunk("stop", content="hello"))
    server.answers(raw(head + b"data: " + event + b"\n\ndata: [DONE]\n\n", close=False))
    answer = await models.generate(question(server, stream=True, timeout=30))
    assert answer.content == "hello"


async def test_every_call_gets_a_connection_at_once(server: RawModelServer, models: Models) -> None:
    """More calls at a time than aiohttp's and httpx's own limit of 100 connections."""
    gate = asyncio.Event()
    ready = completion("hello")

    async def wait_for_all(writer: asyncio.StreamWriter) -> None:
        if len(server.received) == 300:
            gate.set()
        await gate.wait()
        await ready(writer)

    server.answers(wait_for_all)
    answers = await asyncio.gather(*(models.generate(question(server)) for _ in range(300)))
    assert {answer.content for answer in answers} == {"hello"}


async def test_a_cancelled_call_lets_go_of_its_connection(
    server: RawModelServer, models: Models
) -> None:
    server.answers(raw(b"HTTP/1.1 200 OK\r\n\r\n{", close=False))
    call = asyncio.create_task(models.generate(question(server)))

    async def asked() -> bool:
        return bool(server.received)

    await until(asked, within=60, what="the request")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    server.answers(completion("next"))
    assert (await models.generate(question(server))).content == "next"
    assert server.connections == 2


async def test_an_unread_stream_can_be_left_at_any_piece(
    server: RawModelServer, models: Models
) -> None:
    llm, _ = models.resolve("openai:m")
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    event = orjson.dumps(chunk(content="one"))
    server.answers(raw(head + b"data: " + event + b"\n\n", close=False), completion("after"))
    stream = llm.stream(question(server))
    assert await anext(stream) == "one"
    await stream.aclose()  # type: ignore[attr-defined]
    assert (await models.generate(question(server))).content == "after"


async def test_a_stream_that_fails_raises_after_its_pieces(
    server: RawModelServer, models: Models
) -> None:
    llm, _ = models.resolve("openai:m")
    server.answers(events(chunk(content="one"), done=False))
    stream = llm.stream(question(server))
    assert await anext(stream) == "one"
    with pytest.raises(ModelError, match="broke off"):
        await anext(stream)


async def test_redirects_are_not_followed(server: RawModelServer, models: Models) -> None:
    """The key goes where it was meant to go and nowhere else."""
    server.answers(reply(308, b"", {"Location": f"{server.base_url}/elsewhere"}))
    error = await failure(models, question(server))
    assert "settings.base_url" in str(error)
    assert len(server.received) == 1


async def test_cookies_of_one_run_are_not_sent_by_another(
    server: RawModelServer, models: Models
) -> None:
    server.answers(reply(200, completion_body(), {"Set-Cookie": "session=1; Path=/"}))
    await models.generate(question(server))
    await models.generate(question(server))
    assert "cookie" not in server.received[1].headers


async def test_a_proxy_is_used_for_what_is_not_on_this_machine(server: RawModelServer) -> None:
    connections = Connections(proxies={"http": server.base_url.removesuffix("/v1")})
    llm = service_model("openai", connections, environment={})
    server.answers(completion("through"))
    request = question(server)
    settings = request.settings.model_copy(update={"base_url": "http://models.test/v1"})
    answer = await llm.generate(request.model_copy(update={"settings": settings}))
    await connections.aclose()
    assert answer.content == "through"
    assert server.received[0].path == "http://models.test/v1/chat/completions"


async def test_the_switch_lets_no_request_out(server: RawModelServer) -> None:
    """LLM-07: with STEPFLEET_ALLOW_MODEL_REQUESTS=0 only loopback is reached."""
    models = Models(environment={"OPENAI_API_KEY": KEY, "STEPFLEET_ALLOW_MODEL_REQUESTS": "0"})
    server.answers(completion("local"))
    real = ModelRequest(model="openai:gpt-4o", messages=(Message.user("hi"),))
    error = await failure(models, real)
    assert not error.retryable
    assert (await models.generate(question(server))).content == "local"
    await models.aclose()


async def test_a_call_without_an_event_loop_gives_the_same_answer(
    server: RawModelServer, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LLM-16: asynchronous first, with a synchronous facade."""
    monkeypatch.setitem(os.environ, "OPENAI_API_KEY", KEY)
    server.answers(completion("hello"))
    awaited = await models.generate(question(server))
    assert await asyncio.to_thread(generate_sync, question(server)) == awaited
