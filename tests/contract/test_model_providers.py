"""One suite over every provider: the worker's client calls a server of its protocol."""

from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from stepfleet.orchestrator import (
    Agent,
    FinishReason,
    LLMResponse,
    Message,
    ModelRequest,
    ModelSettings,
    Role,
    ToolCall,
    ToolCallRecord,
    ToolSpec,
    supports,
)
from stepfleet.orchestrator.errors import (
    ConfigurationError,
    ContextWindowError,
    ModelError,
    RateLimitError,
)
from stepfleet.orchestrator.models.services import environment_of
from stepfleet.orchestrator.records.conversation.messages import media_messages
from stepfleet.orchestrator.records.errors import ModelErrorCode
from stepfleet.orchestrator.records.responses import OutputFormat
from stepfleet.worker.models import Models
from stepfleet.worker.testing.scenario import Fault, Reply, ToolCallReply, Usage
from stepfleet.worker.testing.server import ModelServer

PROVIDERS = ("openai", "openai-responses", "anthropic", "google", "bedrock", "azure", "groq")
SIGNED = {
    "anthropic": "Let me see.",
    "bedrock": "Let me see.",
    "google": "c2lnbmVkL",
    "openai-responses": ".ees em teL",
}
"""Providers whose reasoning must go back unchanged, and what of it is sent."""

LOOK = ToolSpec(
    name="look",
    description="Look.",
    parameters={"type": "object", "properties": {"at": {"type": "array", "items": {}}}},
)
TWO_CALLS = Reply(
    "Looking.", (ToolCallReply("look", {"at": [1, "é"]}), ToolCallReply("look", {"at": []}))
)


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with ModelServer() as running:
        yield running


@pytest.fixture
async def models(server: ModelServer) -> AsyncIterator[Models]:
    models = Models(environment=environment_of(server.url.removesuffix("/v1")))
    yield models
    await models.aclose()


def asked(provider: str, *messages: Message, **fields: Any) -> ModelRequest:
    settings = ModelSettings.model_validate(fields.pop("settings", {}))
    return ModelRequest(
        model=f"{provider}:some-model",
        messages=messages or (Message.system("Be brief."), Message.user("hi")),
        tools=fields.pop("tools", (LOOK,)),
        settings=settings,
        **fields,
    )


async def test_an_answer_has_text_calls_usage_and_reason(
    provider: str, stream: bool, server: ModelServer, models: Models
) -> None:
    """MSG-07, LLM-04: the same request and the same answer, whoever answers."""
    usage = Usage(prompt_tokens=100, completion_tokens=7, cached_tokens=60, reasoning_tokens=3)
    server.script("hi", Reply(TWO_CALLS.content, TWO_CALLS.tool_calls, usage=usage))
    pieces: list[str] = []
    request = asked(provider, settings={"stream": stream})
    answer = await models.generate(request, on_text=pieces.append)
    assert server.violations == ()
    assert "".join(pieces) == answer.content == "Looking."
    assert [call.arguments for call in answer.tool_calls or ()] == [{"at": [1, "é"]}, {"at": []}]
    assert answer.finish_reason is FinishReason.TOOL_CALLS
    assert answer.model == "some-model"
    assert answer.usage is not None
    counts = answer.usage
    assert (counts.prompt_tokens, counts.completion_tokens) == (100, 7)
    assert (counts.cached_tokens, counts.total_tokens) == (60, 107)
    assert counts.reasoning_tokens == (0 if provider == "bedrock" else 3)  # which counts none apart


async def test_results_of_parallel_calls_come_back_in_one_turn(
    provider: str, server: ModelServer, models: Models
) -> None:
    server.script("hi", TWO_CALLS, "Seen.")
    opening = (Message.system("Be brief."), Message.user("hi"))
    first = await models.generate(asked(provider, *opening))
    calls = first.tool_calls or ()
    results = (Message.tool(calls[0], "one"), Message.tool(calls[1], '{"n": 2}'))
    talk = (*opening, Message.assistant(first.as_content, calls), *results)
    second = await models.generate(asked(provider, *talk))
    assert server.violations == ()
    assert second.content == "Seen."
    assert second.finish_reason is FinishReason.STOP
    answered = [(one.name, one.content) for one in server.requests[-1].answers]
    assert answered == [("look", "one"), ("look", '{"n": 2}')]


async def test_images_and_documents_reach_the_model(
    provider: str, server: ModelServer, models: Models
) -> None:
    server.script("What is this?", "A dot.")
    picture = {"image": {"format": "png", "source": {"bytes": "iVBORw0KGgo="}}}
    paper = {"document": {"format": "pdf", "name": "a.pdf", "source": {"bytes": "JVBERi0="}}}
    question = Message.user([{"text": "What is this?"}, picture, paper])
    answer = await models.generate(asked(provider, question, tools=()))
    assert (server.violations, answer.content) == ((), "A dot.")
    sent = str(server.requests[-1].sent)
    assert "iVBORw0KGgo=" in sent
    assert "JVBERi0=" in sent


async def test_parts_in_the_form_of_another_interface_reach_the_model(
    provider: str, server: ModelServer, models: Models
) -> None:
    server.follow(lambda _: Reply("A dot."))
    talk: list[dict[str, Any]] = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "JVBERi0="}},
        {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
    ]
    answer = await models.generate(asked(provider, Message.user(talk), tools=()))
    assert (server.violations, answer.content) == ((), "A dot.")
    sent = str(server.requests[-1].sent)
    assert "image/png" in sent or "'format': 'png'" in sent
    assert "JVBERi0=" in sent
    takes_audio = "audio" in supports(f"{provider}:some-model").blocks
    assert ("UklGRg==" in sent) == takes_audio
    assert ("[audio (audio/wav, base64 data) left out" in sent) != takes_audio


async def test_an_image_that_a_tool_shows_reaches_the_model(
    provider: str, server: ModelServer, models: Models
) -> None:
    server.script("hi", TWO_CALLS, "Seen.")
    first = await models.generate(asked(provider, Message.user("hi")))
    calls = first.tool_calls or ()
    shown: dict[str, Any] = {"image": {"format": "png", "source": {"bytes": "iVBORw0KGgo="}}}
    records = [
        ToolCallRecord(
            tool_name="look", call_id=one.id, timestamp=datetime.now(UTC), media=(shown,)
        )
        for one in calls
    ]
    results = (Message.tool(calls[0], "one"), Message.tool(calls[1], "two"))
    talk = (Message.user("hi"), Message.assistant(first.as_content, calls), *results)
    answer = await models.generate(asked(provider, *talk, *media_messages(records)))
    assert (server.violations, answer.content) == ((), "Seen.")
    sent = str(server.requests[-1].sent)
    assert sent.count("iVBORw0KGgo=") == 2
    nests = bool(supports(f"{provider}:some-model").result_media)
    assert ("Shown by tool look" in sent) != nests


async def test_a_strict_schema_is_sent_where_the_provider_holds_calls_to_it(
    provider: str, server: ModelServer, models: Models
) -> None:
    server.script("hi", "Done.")
    closed = {
        "type": "object",
        "properties": {"at": {"type": "string"}},
        "required": ["at"],
        "additionalProperties": False,
    }
    strict = ToolSpec(name="strict", description="S.", parameters=closed, strict=True)
    open_one = ToolSpec(name="open", description="O.", parameters=closed, strict=False)
    await models.generate(asked(provider, tools=(strict, open_one, LOOK)))
    assert server.violations == ()
    sent = str(server.requests[-1].sent)
    assert sent.count("'strict': True") == (provider != "google")


@pytest.mark.parametrize("choice", ["auto", "any", "none", "look"])
async def test_every_choice_of_tools_is_sent(
    provider: str, choice: str, server: ModelServer, models: Models
) -> None:
    """MSG-10"""
    server.script("hi", "Done.")
    await models.generate(asked(provider, tool_choice=choice, parallel_tool_calls=False))
    assert server.violations == ()
    # Bedrock has no word for none: the tools themselves are left out.
    chat = server.requests[-1].body.get("tool_choice", "none")
    named = {"type": "function", "function": {"name": "look"}}
    assert chat == {"any": "required", "look": named}.get(choice, choice)


async def test_parallel_calls_are_switched_off_where_the_service_can(
    provider: str, server: ModelServer, models: Models
) -> None:
    server.script("hi", "Done.")
    await models.generate(asked(provider, parallel_tool_calls=False))
    sent = server.requests[-1].sent
    said = (sent.get("parallel_tool_calls"), sent.get("tool_choice", {}))
    is_off = said[0] is False or "disable_parallel_tool_use" in said[1]
    assert is_off == supports(f"{provider}:some-model").parallel_switch


SETTINGS: dict[str, tuple[Any, str]] = {
    "max_tokens": (
        4321,
        "max_tokens max_completion_tokens max_output_tokens maxOutputTokens maxTokens",
    ),
    "temperature": (0.375, "temperature"),
    "top_p": (0.625, "top_p topP"),
    "seed": (77, "seed"),
    "stop": (["X"], "stop stop_sequences stopSequences"),
    "service_tier": ("flex", "service_tier serviceTier"),
    "reasoning_effort": ("high", "reasoning_effort effort thinkingLevel"),
    "reasoning_budget": (2048, "budget_tokens thinkingBudget"),
}
"""Each setting, a value, and the names that it has in requests."""


@pytest.mark.parametrize("setting", SETTINGS)
async def test_a_setting_is_sent_or_refused_when_the_agent_is_defined(
    provider: str, setting: str, server: ModelServer, models: Models
) -> None:
    value, names = SETTINGS[setting]
    if setting not in supports(f"{provider}:some-model").settings:
        with pytest.raises(ConfigurationError, match=setting):
            Agent("a", model=f"{provider}:some-model", settings={setting: value})
        return
    server.script("hi", "Done.")
    await models.generate(asked(provider, settings={setting: value}))
    assert server.violations == ()
    sent = [one for name in names.split() for one in named(server.requests[-1].sent, name)]
    assert [one.lower() if isinstance(one, str) else one for one in sent] == [value]


def named(value: Any, name: str) -> Iterator[Any]:
    """Yield what stands under a name, at any depth of a body; of `{"type": ...}` the type."""
    if isinstance(value, dict):
        for key, one in value.items():
            found = one.get("type", one) if isinstance(one, dict) else one
            yield from [found] if key == name else named(one, name)


async def test_signed_reasoning_goes_back_unchanged_and_to_no_other_provider(
    provider: str, stream: bool, server: ModelServer, models: Models
) -> None:
    server.script("hi", Reply("So.", TWO_CALLS.tool_calls, reasoning="Let me see."), "Seen.")
    settings = {"stream": stream}
    first = await models.generate(asked(provider, Message.user("hi"), settings=settings))
    assert bool(first.reasoning) == (provider in SIGNED)
    stored = LLMResponse.from_json(first.to_json())
    calls = stored.tool_calls or ()
    results = tuple(Message.tool(call, "seen") for call in calls)
    talk = (Message.user("hi"), Message.assistant(stored.as_content, calls), *results)
    await models.generate(asked(provider, *talk, settings=settings))
    assert server.violations == ()
    mark = SIGNED.get(provider, "Let me see.")
    assert (mark in str(server.requests[-1].sent)) == (provider in SIGNED)
    other = "openai" if provider != "openai" else "anthropic"
    await models.generate(asked(other, *talk))
    assert server.violations == ()
    assert mark not in str(server.requests[-1].sent)


async def test_a_run_goes_on_after_an_answer_of_reasoning_alone(
    provider: str, server: ModelServer, models: Models
) -> None:
    """An answer that its limit cut while the model still thought."""
    cut = Reply(reasoning="Hm.", finish_reason="length")
    server.follow(lambda request: "ok" if "go on" in str(request.messages) else cut)
    first = await models.generate(asked(provider, Message.user("hi")))
    talk = (Message.user("hi"), Message.assistant(first.as_content), Message.user("go on"))
    assert (await models.generate(asked(provider, *talk))).content == "ok"
    assert server.violations == ()


async def test_calls_of_another_provider_go_on_with_a_model_that_thinks(
    provider: str, server: ModelServer, models: Models
) -> None:
    call = ToolCall(id="call_1", name="look", arguments={})
    server.script("hi", "never", Reply("Seen.", reasoning="Hm."))
    talk = (Message.user("hi"), Message.assistant("", (call,)), Message.tool(call, "x"))
    wanted: dict[str, Any] = {"reasoning_effort": "high"}
    if provider in ("anthropic", "google", "bedrock"):
        wanted = {"reasoning_budget": 2048}
    request = asked(provider, *talk, settings=wanted)
    answer = await models.generate(
        request.model_copy(update={"model": f"{provider}:claude-sonnet-4-5"})
    )
    assert (server.violations, answer.content) == ((), "Seen.")


@pytest.mark.parametrize(
    ("kind", "expected", "retryable"),
    [
        ("rate_limited", ModelErrorCode.RATE_LIMIT, True),
        ("server_error", ModelErrorCode.SERVER_ERROR, True),
        ("overloaded", ModelErrorCode.SERVER_ERROR, True),
        ("context_length_exceeded", ModelErrorCode.CONTEXT_OVERFLOW, False),
        ("unauthorized", ModelErrorCode.INVALID_API_KEY, False),
        ("forbidden", ModelErrorCode.PERMISSION_DENIED, False),
        ("not_found", ModelErrorCode.MODEL_NOT_FOUND, False),
        ("broken_json", ModelErrorCode.MALFORMED_ANSWER, True),
        ("empty_choices", ModelErrorCode.MALFORMED_ANSWER, True),
        ("truncated_stream", None, True),
        ("error_event", ModelErrorCode.SERVER_ERROR, True),
        ("failed", ModelErrorCode.SERVER_ERROR, True),
        ("reset", ModelErrorCode.CONNECTION_ERROR, True),
        ("reset_mid_body", ModelErrorCode.CONNECTION_ERROR, True),
    ],
)
async def test_a_failure_is_of_its_kind(
    provider: str,
    stream: bool,
    kind: str,
    expected: ModelErrorCode | None,
    retryable: bool,
    server: ModelServer,
    models: Models,
) -> None:
    server.script("hi", "Never read by anyone, for the stream is cut before its end.")
    server.fail(Fault(kind, retry_after=3), attempt=None)
    with pytest.raises(ModelError) as raised:
        await models.generate(asked(provider, settings={"stream": stream}))
    failure = raised.value
    assert failure.retryable is retryable
    assert expected is None or failure.code == expected
    if kind == "rate_limited":
        assert isinstance(failure, RateLimitError)
        assert failure.retry_after == 3
    if kind == "context_length_exceeded":
        assert isinstance(failure, ContextWindowError)
        assert failure.limit in (8192, 200_000, None)
        assert (failure.limit is None) == (provider == "openai-responses")
    if kind == "unauthorized":
        assert environment_of("")[str(failure).partition("variable ")[2].split()[0]]


async def test_a_prompt_that_the_services_filter_blocks_is_no_answer(
    provider: str, stream: bool, server: ModelServer, models: Models
) -> None:
    server.script("hi", Fault("content_filter"))
    request = asked(provider, settings={"stream": stream})
    with pytest.raises(ModelError) as raised:
        await models.generate(request)
    assert raised.value.code == ModelErrorCode.CONTENT_FILTER
    assert not raised.value.retryable
    if provider == "google":  # it says so in an answer, and counts the prompt
        assert "blockReason PROHIBITED_CONTENT" in raised.value.message
        assert raised.value.usage is not None


async def test_a_refusal_of_the_model_is_known_as_one(
    provider: str, stream: bool, server: ModelServer, models: Models
) -> None:
    server.script("hi", Fault("refusal", message="Not that."))
    request = asked(provider, settings={"stream": stream})
    if provider in ("anthropic", "google"):  # no words of the model come with it
        with pytest.raises(ModelError, match=r"refusal|SAFETY") as raised:
            await models.generate(request)
        assert raised.value.finish_reason is FinishReason.CONTENT_FILTER
        assert ("Not that." in raised.value.message) == (provider == "anthropic")
        assert raised.value.usage is not None
        return
    answer = await models.generate(request)
    assert server.violations == ()
    assert answer.finish_reason is FinishReason.CONTENT_FILTER
    assert answer.content == "Not that."
    assert answer.usage is not None


async def test_data_of_a_schema_are_requested_natively(
    provider: str, server: ModelServer, models: Models
) -> None:
    server.script("hi", '{"city": "Rome"}')
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    output = OutputFormat(name="place", json_schema=schema)
    answer = await models.generate(asked(provider, tools=(), output=output))
    assert (server.violations, answer.content) == ((), '{"city": "Rome"}')
    sent = str(server.requests[-1].sent).replace('"', "'").replace(" ", "")
    assert "'city':{'type':'string'}" in sent


async def test_a_calls_id_of_another_provider_is_taken(
    provider: str, server: ModelServer, models: Models
) -> None:
    call = ToolCall(id="functions.look:0", name="look", arguments={})
    server.script("hi", "never", "Seen.")
    talk = (Message.user("hi"), Message.assistant("", (call,)), Message.tool(call, "x"))
    assert (await models.generate(asked(provider, *talk))).content == "Seen."
    assert server.violations == ()


async def test_a_request_has_the_name_that_its_provider_gave_it(
    provider: str, stream: bool, server: ModelServer, models: Models
) -> None:
    """In the answer, and in the text of a failure."""
    server.script("hi", "Hello.", "Again.")
    request = asked(provider, settings={"stream": stream})
    named = (await models.generate(request)).request_id
    assert named == f"req-{server.requests[-1].number}"
    server.fail(Fault("server_error"), attempt=None)
    with pytest.raises(ModelError) as raised:
        await models.generate(request)
    said = f" (request req-{server.requests[-1].number})"
    assert str(raised.value).endswith(said) == (provider != "google")  # whose errors have no name


@pytest.mark.parametrize(
    ("service", "field", "value"),
    [
        ("deepseek", "reasoning_content", "Let me see."),
        ("openrouter", "reasoning_details", [{"type": "reasoning.text", "text": "Let me see."}]),
        ("vllm", "reasoning", "Let me see."),
        ("groq", "reasoning", "Let me see."),
    ],
)
async def test_a_compatible_servers_reasoning_is_readable_and_back_where_it_wants_it(
    service: str, field: str, value: Any, stream: bool, server: ModelServer, models: Models
) -> None:
    server.script("hi", Reply("So.", TWO_CALLS.tool_calls, extra={field: value}), "Seen.")
    request = asked(service, Message.user("hi"), settings={"stream": stream})
    first = await models.generate(request)
    assert first.reasoning_text == "Let me see."
    calls = first.tool_calls or ()
    results = tuple(Message.tool(call, "seen") for call in calls)
    talk = (Message.user("hi"), Message.assistant(first.as_content, calls), *results)
    await models.generate(asked(service, *talk))
    assert server.violations == ()
    assert server.requests[-1].messages[1].get(field) == (None if service == "groq" else value)


async def test_system_and_developer_messages_reach_the_model_in_their_order(
    provider: str, server: ModelServer, models: Models
) -> None:
    server.script("hi", "Oui.")
    developer = Message(role=Role.DEVELOPER, content="In French.")
    await models.generate(
        asked(provider, Message.system("Be brief."), developer, Message.user("hi"))
    )
    assert server.violations == ()
    sent = str(server.requests[-1].sent)
    assert 0 < sent.index("Be brief.") < sent.index("In French.")
    keeps = provider in ("openai-responses", "openai", "azure") and "'developer'" in sent
    assert keeps == (provider == "openai-responses")  # by chat completions to OpenAI's own hosts
