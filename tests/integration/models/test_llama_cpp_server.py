"""A real llama.cpp server, from its wheel, with a tiny random model: every protocol that it has."""

import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import orjson
import pytest
from support.servers.foreign import environment, free_port, serving
from support.servers.tiny_gguf import WINDOW, write_model

from stepfleet.orchestrator import (
    FinishReason,
    LLMResponse,
    Message,
    ModelErrorCode,
    ModelRequest,
    ModelSettings,
    ToolSpec,
)
from stepfleet.orchestrator.errors import ContextWindowError, ModelError
from stepfleet.orchestrator.models.services import environment_of
from stepfleet.orchestrator.records.responses import OutputFormat
from stepfleet.worker.models import Models

SERVER = "xllamacpp==2026.10.11549"  # llama.cpp's own server in a process of Python
SERVE = f"""
import signal, sys, xllamacpp
given = xllamacpp.CommonParams()
given.model.path, given.port = sys.argv[1], int(sys.argv[2])
given.n_ctx, given.n_parallel, given.cpuparams.n_threads = {WINDOW}, 1, 1
given.sampling.temp = 0.0
server = xllamacpp.Server(given)
signal.pause()
"""
PROVIDERS = ("llamacpp", "openai-responses", "anthropic")
NUMBER = {
    "type": "object",
    "properties": {"at": {"type": "integer"}},
    "required": ["at"],
    "additionalProperties": False,
}
LOOK = ToolSpec(name="look", description="Look.", parameters=NUMBER)
ATTEMPTS = 3
HI = (Message.system("Be brief."), Message.user("hi"))

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("llama")
    write_model(folder / "tiny.gguf")
    python, port = environment(SERVER) / "python", free_port()
    command = [str(python), "-c", SERVE, str(folder / "tiny.gguf"), str(port)]
    root = f"http://127.0.0.1:{port}"
    with serving(command, f"{root}/health", log=folder / "log", env=os.environ):
        yield root


@pytest.fixture
async def models(address: str) -> AsyncIterator[Models]:
    models = Models(environment=environment_of(address))
    yield models
    await models.aclose()


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def asked(provider: str, *messages: Message, stream: bool = False, **fields: Any) -> ModelRequest:
    settings = ModelSettings(stream=stream, max_tokens=fields.pop("max_tokens", 300))
    model = f"{provider}:tiny"
    return ModelRequest(model=model, messages=messages or HI, settings=settings, **fields)


async def answered(models: Models, request: ModelRequest, **options: Any) -> LLMResponse:
    """Return the answer as a step gets it: this server may close a connection behind a stream."""
    for _ in range(ATTEMPTS):
        try:
            return await models.generate(request, **options)
        except ModelError as error:
            if error.code != ModelErrorCode.CONNECTION_ERROR:
                raise
    raise AssertionError("no connection lasts")


async def test_text_and_usage_arrive(provider: str, stream: bool, models: Models) -> None:
    pieces: list[str] = []
    request = asked(provider, stream=stream, max_tokens=20)
    answer = await answered(models, request, on_text=pieces.append)
    assert answer.content == "".join(pieces)
    assert answer.content
    assert len(pieces) > 1 or not stream
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 40
    assert 0 < answer.usage.completion_tokens <= 20


async def test_a_call_of_the_grammar_comes_and_its_result_goes_back(
    provider: str, stream: bool, models: Models
) -> None:
    talk: tuple[Message, ...] = HI
    for _ in range(2):
        request = asked(provider, *talk, stream=stream, tools=(LOOK,), tool_choice="any")
        answer = await answered(models, request)
        calls = answer.tool_calls or ()
        assert {(call.name, type(call.arguments["at"])) for call in calls} == {("look", int)}
        assert answer.finish_reason is FinishReason.TOOL_CALLS
        results = (Message.tool(call, "seen") for call in calls)
        talk = (*talk, Message.assistant(answer.as_content, calls), *results)


async def test_data_fit_the_schema(stream: bool, models: Models) -> None:
    output = OutputFormat(name="place", json_schema=NUMBER)
    answer = await answered(models, asked("llamacpp", stream=stream, output=output))
    assert isinstance(orjson.loads(answer.content or "")["at"], int)


async def test_a_prompt_beyond_the_window_is_named_as_such(
    provider: str, stream: bool, models: Models
) -> None:
    with pytest.raises(ContextWindowError) as raised:
        await answered(models, asked(provider, Message.user("a" * 2 * WINDOW), stream=stream))
    assert raised.value.limit == WINDOW
