"""A real LiteLLM proxy, called on each protocol that it has; behind it mock answers and services.

What it sends to the services behind it must be of their protocol: the model server refuses it
otherwise.
"""

import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest
from support.servers.foreign import environment, free_port, serving
from support.servers.signing_gemini import signing_gemini

from stepfleet.orchestrator import (
    FinishReason,
    LLMResponse,
    Message,
    ModelErrorCode,
    ModelRequest,
    ModelSettings,
    ToolSpec,
)
from stepfleet.orchestrator.errors import ContextWindowError, ModelError, RateLimitError
from stepfleet.orchestrator.models.services import environment_of
from stepfleet.orchestrator.records.responses import ReasoningEffort
from stepfleet.worker.models import Models
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Fault, Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

PROXY = "litellm[proxy]==1.106.2"
PROVIDERS = ("litellm", "openai-responses", "anthropic")
BROKEN_MOCK = "openai-responses"  # its stream of a mock answer is an error of the proxy
MOCK = "Hello from the mock."
CONFIG = """
model_list:
  - model_name: mock
    litellm_params: {{model: openai/gpt-4o-mini, api_key: none, mock_response: {mock}}}
  - model_name: openai
    litellm_params: {{model: openai/tiny, api_key: none, api_base: {root}/v1}}
  - model_name: anthropic
    litellm_params: {{model: anthropic/claude-tiny, api_key: none, api_base: {root}}}
  - model_name: thinking
    litellm_params: {{model: anthropic/claude-sonnet-4-5, api_key: none, api_base: {root}}}
  - model_name: gemini
    litellm_params: {{model: gemini/gemini-3-pro-preview, api_key: none, api_base: {gemini}}}
router_settings: {{num_retries: 0, disable_cooldowns: true}}
"""
ALONE = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would fetch the map
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
}
LOOK = ToolSpec(
    name="look",
    description="Look.",
    parameters={"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]},
)
TWO_CALLS = Reply("Looking.", (ToolCallReply("look", {"at": 1}), ToolCallReply("look", {"at": 2})))


def two_calls_then_text(request: RequestRecord) -> Reply:
    return Reply("Seen.") if request.answers else TWO_CALLS


pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def behind() -> Iterator[ModelServer]:
    with ModelServer() as server:
        yield server


@pytest.fixture(scope="module")
def gemini() -> Iterator[str]:
    with signing_gemini() as address:
        yield address


@pytest.fixture(scope="module")
def address(
    behind: ModelServer, gemini: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("litellm"), free_port()
    root = behind.url.removesuffix("/v1")
    (folder / "config.yaml").write_text(CONFIG.format(mock=MOCK, root=root, gemini=gemini))
    options = ["--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)]
    command = [str(environment(PROXY) / "litellm"), *options]
    root = f"http://127.0.0.1:{port}"
    log, ready = folder / "log", f"{root}/health/liveliness"
    with serving(command, ready, log=log, env={**os.environ, **ALONE}):
        yield root


@pytest.fixture
async def models(address: str) -> AsyncIterator[Models]:
    models = Models(environment=environment_of(address))
    yield models
    await models.aclose()


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def asked(
    model: str,
    *messages: Message,
    stream: bool = False,
    effort: ReasoningEffort | None = None,
    **fields: Any,
) -> ModelRequest:
    talk = messages or (Message.system("Be brief."), Message.user("hi"))
    most = 5000 if effort else 100
    settings = ModelSettings(stream=stream, max_tokens=most, reasoning_effort=effort)
    return ModelRequest(model=model, messages=talk, settings=settings, **fields)


@pytest.mark.parametrize("provider", [one for one in PROVIDERS if one != BROKEN_MOCK])
async def test_a_mock_answer_is_read_also_where_it_is_not_streamed(
    provider: str, stream: bool, models: Models
) -> None:
    pieces: list[str] = []
    request = asked(f"{provider}:mock", stream=stream)
    answer = await models.generate(request, on_text=pieces.append)
    assert "".join(pieces) == answer.content == MOCK
    assert answer.finish_reason is FinishReason.STOP
    assert answer.usage is not None
    assert answer.usage.total_tokens > 0


@pytest.mark.parametrize("service", ["openai", "anthropic"])
@pytest.mark.parametrize("provider", PROVIDERS)
async def test_calls_and_their_results_pass_the_proxy(
    provider: str, service: str, stream: bool, models: Models, behind: ModelServer
) -> None:
    refused = len(behind.violations)
    behind.follow(two_calls_then_text)
    opening = (Message.system("Be brief."), Message.user("hi"))
    model = f"{provider}:{service}"
    first = await models.generate(asked(model, *opening, stream=stream, tools=(LOOK,)))
    calls = first.tool_calls or ()
    assert [call.arguments for call in calls] == [{"at": 1}, {"at": 2}]
    assert first.finish_reason is FinishReason.TOOL_CALLS
    results = (Message.tool(calls[0], "one"), Message.tool(calls[1], "two"))
    talk = (*opening, Message.assistant(first.as_content, calls), *results)
    second = await models.generate(asked(model, *talk, stream=stream, tools=(LOOK,)))
    assert (second.content, second.finish_reason) == ("Seen.", FinishReason.STOP)
    assert [one.content for one in behind.requests[-1].answers] == ["one", "two"]
    assert behind.violations[refused:] == ()


@pytest.mark.parametrize(
    "model",
    ["litellm:thinking", "litellm:gemini", "openai-responses:gemini", "anthropic:gemini"],
)
async def test_what_was_thought_goes_back_with_the_calls(
    model: str, stream: bool, models: Models, behind: ModelServer
) -> None:
    """Claude's thinking and Gemini's signatures: the services refuse calls without them."""
    behind.follow(
        lambda one: "Seen." if one.answers else replace(TWO_CALLS, reasoning="Let me see.")
    )
    opening, effort = Message.user("hi"), "low" if model == "litellm:thinking" else None
    how: dict[str, Any] = {"stream": stream, "effort": effort, "tools": (LOOK,)}
    first = await models.generate(asked(model, opening, **how))
    stored = LLMResponse.from_json(first.to_json())
    calls = stored.tool_calls or ()
    assert calls
    results = [Message.tool(call, "seen") for call in calls]
    talk = (opening, Message.assistant(stored.as_content, calls), *results)
    second = await models.generate(asked(model, *talk, **how))
    assert second.content == "Seen."


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_failures_keep_their_kind(
    provider: str, stream: bool, models: Models, behind: ModelServer
) -> None:
    request = asked(f"{provider}:openai", stream=stream)
    behind.follow(lambda _: Fault("rate_limited"))
    with pytest.raises(RateLimitError):
        await models.generate(request)
    behind.follow(lambda _: Fault("context_length_exceeded"))
    with pytest.raises(ContextWindowError):
        await models.generate(request)
    behind.follow(lambda _: Fault("unauthorized"))
    with pytest.raises(ModelError) as raised:
        await models.generate(request)
    assert raised.value.code == ModelErrorCode.INVALID_API_KEY
    with pytest.raises(ModelError) as raised:
        await models.generate(asked(f"{provider}:unknown", stream=stream))
    assert not raised.value.retryable
