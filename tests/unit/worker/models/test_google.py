"""Google's Gemini, checked by the types of the official SDK and by its client."""

from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from support import vendors

from stepfleet.orchestrator import (
    FinishReason,
    LLMResponse,
    Message,
    ModelErrorCode,
    ModelRequest,
    ModelSettings,
    ToolCall,
    ToolSpec,
)
from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.records.responses import OutputFormat
from stepfleet.worker.models.google import StreamedContent, parse_content, request_body, usage_of
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

LOOK = ToolSpec(name="look", description="Look.", parameters={"type": "object", "properties": {}})


def answered(parts: list[dict[str, Any]], reason: str) -> dict[str, Any]:
    return {"candidates": [{"content": {"parts": parts}, "finishReason": reason}]}


def body(*messages: Message, settings: dict[str, Any] | None = None, **fields: Any) -> Any:
    request = ModelRequest(
        model="gemini-x",
        messages=messages or (Message.user("hi"),),
        settings=ModelSettings.model_validate(settings or {}),
        **fields,
    )
    made = request_body(request)
    for turn in made["contents"]:
        vendors.genai.types.Content.model_validate(turn)
    vendors.genai.types.GenerationConfig.model_validate(made.get("generationConfig", {}))
    vendors.genai.types.ToolConfig.model_validate(made.get("toolConfig", {}))
    for tool in made.get("tools", ()):
        vendors.genai.types.Tool.model_validate(tool)
    return made


def test_a_whole_conversation_has_the_sdks_types() -> None:
    call = ToolCall(id="call.1", name="look", arguments={"a": "é"})
    other = ToolCall(id="call_2", name="look", arguments={})
    signed = {"reasoning": {"provider": "google", "at": 1, "data": {"thoughtSignature": "c2ln"}}}
    made = body(
        Message.system("Be brief."),
        Message.user([{"text": "see"}, {"image": {"source": {"bytes": "iVBORw0KGgo="}}}]),
        Message.assistant([signed, {"text": "ok"}], (call, other)),
        Message.tool(call, "one"),
        Message.tool(other, ""),
        Message.user("And?"),
        tools=(LOOK,),
        tool_choice="look",
        output=OutputFormat(json_schema={"type": "object"}),
        settings={"stop": ["X"], "temperature": 0.5, "seed": 3, "reasoning_effort": "low"},
    )
    assert made["systemInstruction"] == {"parts": [{"text": "Be brief."}]}
    assert [turn["role"] for turn in made["contents"]] == ["user", "model", "user"]
    text, first, second = made["contents"][1]["parts"]
    assert (text, first["thoughtSignature"]) == ({"text": "ok"}, "c2ln")
    assert "thoughtSignature" not in second
    answers = [part.get("functionResponse") for part in made["contents"][2]["parts"]]
    assert answers[0] == {"id": "call.1", "name": "look", "response": {"result": "one"}}
    assert answers[2] is None
    calling = made["toolConfig"]["functionCallingConfig"]
    assert calling == {"mode": "ANY", "allowedFunctionNames": ["look"]}
    assert made["generationConfig"]["thinkingConfig"] == {"thinkingLevel": "LOW"}


def test_calls_of_another_providers_model_are_sent_as_such() -> None:
    call = ToolCall(id="c", name="look", arguments={})
    made = body(Message.user("hi"), Message.assistant("", (call, call)), Message.tool(call, "x"))
    marks = [part.get("thoughtSignature") for part in made["contents"][1]["parts"]]
    assert marks == ["skip_thought_signature_validator", None]


@pytest.mark.parametrize(
    ("settings", "thinking"),
    [
        ({}, None),
        ({"reasoning_effort": "none"}, {"thinkingBudget": 0}),
        ({"reasoning_effort": "high"}, {"thinkingLevel": "HIGH"}),
        ({"reasoning_budget": 0}, {"thinkingBudget": 0}),
        ({"reasoning_budget": 512}, {"thinkingBudget": 512}),
    ],
)
def test_reasoning_is_requested_by_effort_or_budget(
    settings: dict[str, Any], thinking: Any
) -> None:
    assert body(settings=settings).get("generationConfig", {}).get("thinkingConfig") == thinking


def parsed(parts: list[dict[str, Any]], **fields: Any) -> LLMResponse:
    candidate = {"content": {"role": "model", "parts": parts}, "finishReason": "STOP", **fields}
    payload = {"candidates": [candidate], "modelVersion": "gemini-x-1"}
    vendors.genai.types.GenerateContentResponse.model_validate(payload)
    return parse_content(payload, "gemini-x")


@pytest.mark.parametrize(
    "parts",
    [
        [{"text": "a", "thoughtSignature": "c2ln"}],
        [{"text": "a"}, {"functionCall": {"name": "look"}, "thoughtSignature": "c2ln"}],
        [{"functionCall": {"name": "look", "args": {"x": 1}}, "thoughtSignature": "c2ln"}],
        [{"text": "a"}, {"text": "", "thoughtSignature": "c2ln"}],
        [{"text": "", "thoughtSignature": "c2ln"}],
        [{"functionCall": {"name": "look"}}, {"text": "", "thoughtSignature": "c2ln"}],
    ],
)
def test_a_signature_goes_back_with_its_part(parts: list[dict[str, Any]]) -> None:
    answer = parsed(parts)
    back = body(Message.user("hi"), Message.assistant(answer.as_content, answer.tool_calls or ()))
    sent = back["contents"][1]["parts"]
    (signed,) = (part for part in sent if "thoughtSignature" in part)
    (given,) = (part for part in parts if "thoughtSignature" in part)
    assert signed["thoughtSignature"] == "c2ln"
    assert ("functionCall" in signed) == ("functionCall" in given)


def test_thoughts_are_no_text() -> None:
    assert parsed([{"text": "Hm.", "thought": True}, {"text": "Yes."}]).content == "Yes."


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("STOP", FinishReason.STOP),
        ("MAX_TOKENS", FinishReason.LENGTH),
        ("SAFETY", FinishReason.CONTENT_FILTER),
        ("LANGUAGE", FinishReason.CONTENT_FILTER),
    ],
)
def test_finish_reasons(reason: str, expected: FinishReason) -> None:
    assert parsed([{"text": "x"}], finishReason=reason).finish_reason is expected


def test_a_refused_prompt_is_a_failure_of_the_content_filter() -> None:
    payload = {"promptFeedback": {"blockReason": "SAFETY"}}
    stream = StreamedContent()
    stream.add(orjson.dumps(payload))
    for given in (payload, stream.payload()):
        with pytest.raises(ModelError, match="blockReason SAFETY") as raised:
            parse_content(given, "m")
        assert raised.value.code == ModelErrorCode.CONTENT_FILTER
        assert not raised.value.retryable


@pytest.mark.parametrize(
    ("counts", "completion"),
    [
        ({"totalTokenCount": 1700}, 700),
        ({"totalTokenCount": 1700, "thoughtsTokenCount": 200}, 700),
        ({"totalTokenCount": 1700, "toolUsePromptTokenCount": 300}, 400),
        ({"totalTokenCount": 1000}, 0),
        ({"totalTokenCount": 7}, 0),
        ({"totalTokenCount": 1700, "candidatesTokenCount": 0}, 0),
        ({}, None),
    ],
)
def test_a_usage_without_a_count_of_the_text_has_it_in_the_total(
    counts: dict[str, int], completion: int | None
) -> None:
    """Without a total the usage is estimated."""
    usage = usage_of({"promptTokenCount": 1000, **counts})
    assert (usage and usage.completion_tokens) == completion


def test_tokens_of_thoughts_are_completion_tokens() -> None:
    usage = usage_of(
        {
            "promptTokenCount": 10,
            "candidatesTokenCount": 5,
            "thoughtsTokenCount": 7,
            "cachedContentTokenCount": 4,
            "promptTokensDetails": [{"modality": "AUDIO", "tokenCount": 3}],
        }
    )
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (10, 12, 22)
    assert (usage.cached_tokens, usage.reasoning_tokens, usage.audio_tokens) == (4, 7, 3)


@pytest.mark.parametrize(
    "payload",
    [
        {},
        {"candidates": []},
        {"candidates": [{"content": {"parts": "x"}}]},
        {"candidates": [{"finishReason": "MALFORMED_FUNCTION_CALL"}]},
        answered([{"text": "I will call it"}], "MALFORMED_FUNCTION_CALL"),
        answered([{"text": "I will call it"}], "UNEXPECTED_TOOL_CALL"),
        answered([{"text": "I will call it"}], "TOO_MANY_TOOL_CALLS"),
    ],
)
def test_an_answer_that_is_none_is_malformed_and_tried_again(payload: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="malformed") as raised:
        parse_content(payload, "m")
    assert raised.value.retryable


@pytest.mark.parametrize("event", [b"[]", b"{", b'{"candidates":[{"content":[1]}]}'])
def test_an_event_that_is_none_is_malformed(event: bytes) -> None:
    with pytest.raises(ModelError, match="malformed"):
        StreamedContent().add(event)


def test_a_stream_without_its_end_is_malformed() -> None:
    stream = StreamedContent()
    assert stream.add(b'{"candidates":[{"content":{"parts":[{"text":"a"}]}}]}') == "a"
    with pytest.raises(ModelError, match="broke off"):
        stream.payload()


def test_a_stream_without_any_candidate_says_so() -> None:
    stream = StreamedContent()
    stream.add(b'{"usageMetadata":{"promptTokenCount":9},"responseId":"R"}')
    with pytest.raises(ModelError, match="no candidates"):
        stream.payload()


def test_a_stream_of_many_calls_is_bounded() -> None:
    stream = StreamedContent()
    part = {"functionCall": {"name": "look", "args": {}}}
    event = orjson.dumps({"candidates": [{"content": {"parts": [part] * 100}}]})
    for _ in range(100):
        stream.add(event)
    stream.add(b'{"candidates":[{"finishReason":"STOP"}]}')
    assert len(parse_content(stream.payload(), "m").tool_calls or ()) == 257


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with ModelServer() as running:
        yield running


def test_the_official_client_understands_the_model_server(server: ModelServer) -> None:
    """So what our tests are answered with has the form of the service's answers."""
    url = server.url.removesuffix("/v1")
    client = vendors.genai.Client(
        api_key="k", http_options=vendors.genai.types.HttpOptions(base_url=url)
    )
    server.script("hi", Reply("Hello!", (ToolCallReply("look", {"a": 1}),), reasoning="Hm."))
    declared = vendors.genai.types.FunctionDeclaration(name="look", description="Look.")
    config = vendors.genai.types.GenerateContentConfig(
        tools=[vendors.genai.types.Tool(function_declarations=[declared])],
        automatic_function_calling=vendors.genai.types.AutomaticFunctionCallingConfig(disable=True),
    )
    whole = client.models.generate_content(model="gemini-x", contents="hi", config=config)
    pieces = client.models.generate_content_stream(model="gemini-x", contents="hi", config=config)
    streamed = [part for piece in pieces for part in (piece.parts or ())]
    assert whole.function_calls is not None
    assert whole.function_calls[0].args == {"a": 1}
    assert whole.candidates is not None
    assert whole.candidates[0].finish_reason is vendors.genai.types.FinishReason.STOP
    texts = [part.text for part in streamed if part.text and not part.thought]
    assert "".join(texts) == "Hello!"
    assert server.violations == ()
    server.fail("unauthorized", attempt=None)
    with pytest.raises(vendors.genai.errors.ClientError, match="API key not valid"):
        client.models.generate_content(model="gemini-x", contents="hi", config=config)


@pytest.mark.parametrize("reason", [[], {}, 5, None])
def test_a_strange_finish_reason_is_another_one(reason: Any) -> None:
    found = parse_content({"candidates": [{"finishReason": reason}]}, "gemini-x")
    assert found.finish_reason is FinishReason.OTHER
