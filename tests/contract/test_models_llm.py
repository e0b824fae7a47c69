"""One suite over everything that is an LLM: the built-in adapter, custom classes, plug-ins."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from support.servers.raw_model_server import RawModelServer, completion, events

from stepfleet.orchestrator import (
    LLM,
    FinishReason,
    LLMResponse,
    Message,
    ModelRequest,
    ModelSettings,
)
from stepfleet.orchestrator.errors import ModelTimeoutError
from stepfleet.orchestrator.models.services import SERVICES
from stepfleet.worker.models import Models
from stepfleet.worker.models.connections import Connections
from stepfleet.worker.models.http_model import HttpModel
from stepfleet.worker.models.openai.chat import CHAT_COMPLETIONS
from stepfleet.worker.models.providers import service_model

HELLO = {"choices": [{"index": 0, "delta": {"content": "hello"}, "finish_reason": "stop"}]}


class Subclassed(LLM):
    async def generate(self, request: ModelRequest) -> LLMResponse:
        return LLMResponse(content="hello")


class OfItsOwn:
    async def generate(self, request: ModelRequest) -> LLMResponse:
        return LLMResponse(content="hello", model="own")

    async def stream(self, request: ModelRequest) -> AsyncIterator[str]:
        for piece in ("hel", "lo"):
            yield piece


@pytest.fixture
async def server() -> AsyncIterator[RawModelServer]:
    async with RawModelServer().running() as running:
        yield running


@pytest.fixture
async def connections() -> AsyncIterator[Connections]:
    connections = Connections()
    yield connections
    await connections.aclose()


@pytest.fixture(params=[HttpModel, Subclassed, OfItsOwn])
def llm(request: pytest.FixtureRequest, connections: Connections) -> LLM:
    kind: Callable[..., LLM] = request.param
    if kind is HttpModel:
        return service_model("openai", connections, environment={})
    return kind()


def question(server: RawModelServer) -> ModelRequest:
    settings = ModelSettings(base_url=server.base_url)
    return ModelRequest(model="m", messages=(Message.user("hi"),), settings=settings)


def test_it_has_the_protocol(llm: LLM) -> None:
    """LLM-01: ten lines of one's own are enough."""
    assert isinstance(llm, LLM)


async def test_it_answers_with_a_response(llm: LLM, server: RawModelServer) -> None:
    """LLM-01, LLM-02, LLM-05: the same type whoever answers."""
    server.answers(completion("hello"))
    response = await llm.generate(question(server))
    assert isinstance(response, LLMResponse)
    assert response.content == "hello"
    assert response.tool_calls is None
    assert response.finish_reason is FinishReason.STOP


async def test_it_streams_its_text_in_pieces(llm: LLM, server: RawModelServer) -> None:
    """LLM-01, STRM-01: text pieces that join to the answer."""
    server.answers(events(HELLO))
    pieces = [piece async for piece in llm.stream(question(server))]
    assert "".join(pieces) == "hello"


async def test_a_worker_calls_it(llm: LLM, server: RawModelServer) -> None:
    """LLM-05: whoever answers, the worker's call and its answer look the same."""
    server.answers(completion("hello"))
    models = Models()
    response = await models.generate(question(server), llm=llm)
    await models.aclose()
    assert response.content == "hello"
    assert response.model


class Hanging(HttpModel):
    async def generate(self, request: ModelRequest) -> LLMResponse:
        await asyncio.Event().wait()
        raise AssertionError(request)


async def test_a_subclass_of_the_built_in_adapter_is_held_to_the_deadline_too(
    connections: Connections,
) -> None:
    request = ModelRequest(model="m", messages=(), settings=ModelSettings(timeout=0.05))
    models = Models()
    hanging = Hanging(SERVICES["openai"], CHAT_COMPLETIONS, connections, environment={})
    with pytest.raises(ModelTimeoutError):
        await models.generate(request, llm=hanging)
    await models.aclose()
