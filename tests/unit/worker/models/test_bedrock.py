"""Bedrock's Converse, checked by botocore's model of the service and by its client."""

import base64
from collections.abc import Iterator
from typing import Any

import botocore.session
import orjson
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError, EventStreamError
from botocore.serialize import create_serializer
from botocore.validate import ParamValidator

from stepfleet.orchestrator import (
    FinishReason,
    Message,
    ModelRequest,
    ModelSettings,
    Role,
    ToolCall,
    ToolSpec,
)
from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.models.endpoint import endpoint_of
from stepfleet.orchestrator.models.services import SERVICES
from stepfleet.orchestrator.records.responses import OutputFormat
from stepfleet.worker.models.bedrock.converse import (
    CONVERSE,
    StreamedConverse,
    parse_converse,
    usage_of,
)
from stepfleet.worker.models.bedrock.request import request_body
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

CLAUDE = "us.anthropic.claude-sonnet-4-5-20250929-v1:0"
NOVA, GPT, LLAMA = "amazon.nova-2-lite-v1:0", "openai.gpt-oss-120b-1:0", "meta.llama3-3-70b"
PROFILE = "arn:aws:bedrock:eu-west-1:123456789012:application-inference-profile/ab12"
LOOK = ToolSpec(name="look", description="Look.", parameters={"type": "object", "properties": {}})
STRICT = ToolSpec(
    name="strict",
    description="",
    parameters={"type": "object", "properties": {}, "additionalProperties": False},
    strict=True,
)
CALL = ToolCall(id="call.1", name="look", arguments={"a": "é"})
OTHER = ToolCall(id="call_2", name="look", arguments={})
SIGNED = {"reasoningContent": {"reasoningText": {"text": "Hm.", "signature": "c2ln"}}}
SERVICE = botocore.session.Session().get_service_model("bedrock-runtime")
POINT = {"cachePoint": {"type": "default"}}


def with_blobs(value: Any, shape: Any) -> Any:
    """Return a body as botocore takes it: bytes where the wire has base64."""
    match shape.type_name:
        case "blob":
            return base64.b64decode(value)
        case "structure" if not getattr(shape, "is_document_type", False):
            return {name: with_blobs(one, shape.members[name]) for name, one in value.items()}
        case "list":
            return [with_blobs(one, shape.member) for one in value]
    return value


def body(*messages: Message, model: str = CLAUDE, **fields: Any) -> Any:
    """Return the body of a request, which is what botocore sends for the same request."""
    settings = ModelSettings.model_validate(fields.pop("settings", {}))
    request = ModelRequest(
        model=model, messages=messages or (Message.user("hi"),), settings=settings, **fields
    )
    made = request_body(request)
    operation = SERVICE.operation_model("ConverseStream" if settings.stream else "Converse")
    given = with_blobs({**made, "modelId": model}, operation.input_shape)
    report = ParamValidator().validate(given, operation.input_shape)
    assert not report.has_errors(), report.generate_report()
    sent = create_serializer("rest-json").serialize_to_request(given, operation)
    assert orjson.loads(sent["body"]) == made
    environment = {"AWS_REGION": "eu-west-1", "AWS_BEARER_TOKEN_BEDROCK": "k"}
    endpoint = endpoint_of(settings, environment, SERVICES["bedrock"], path=CONVERSE.route.path)
    root = "https://bedrock-runtime.eu-west-1.amazonaws.com"
    assert CONVERSE.route.url(endpoint, model, settings.stream) == root + sent["url_path"]
    return made


def kinds(turn: dict[str, Any]) -> list[str]:
    return [next(iter(block)) for block in turn["content"]]


@pytest.mark.parametrize("model", [CLAUDE, NOVA, GPT, LLAMA, PROFILE])
@pytest.mark.parametrize("stream", [False, True])
def test_a_whole_conversation_is_what_botocore_sends(model: str, stream: bool) -> None:
    provider = {CLAUDE: "bedrock/claude", NOVA: "bedrock/nova"}.get(model, "bedrock")
    reasoning = {"reasoning": {"provider": provider, "at": 0, "data": SIGNED}}
    picture = {"image": {"format": "jpg", "source": {"bytes": "/9j/"}}}
    paper = {"document": {"format": "pdf", "name": "a.pdf", "source": {"url": "s3://bucket/key"}}}
    made = body(
        Message.system("Be brief."),
        Message(role=Role.DEVELOPER, content="In English."),
        Message.user([{"text": "see"}, picture, paper]),
        Message.assistant([reasoning, {"text": "ok"}], (CALL, OTHER)),
        Message(role=Role.TOOL, content=[{"json": {"n": 1}}, picture], tool_call_id="call.1"),
        Message.tool(OTHER, ""),
        Message.user("And?"),
        model=model,
        tools=(LOOK, STRICT),
        tool_choice="look",
        parallel_tool_calls=False,
        output=OutputFormat(json_schema={"type": "object"}),
        settings={
            "stop": ["X"],
            "temperature": 0.5,
            "top_p": 0.9,
            "max_tokens": 9,
            "service_tier": "flex",
            "stream": stream,
        },
    )
    assert [block["text"] for block in made["system"][:2]] == ["Be brief.", "In English."]
    assert [turn["role"] for turn in made["messages"]] == ["user", "assistant", "user"]
    assert kinds(made["messages"][1]) == ["reasoningContent", "text", "toolUse", "toolUse"]
    assert kinds(made["messages"][2])[:3] == ["toolResult", "toolResult", "text"]
    used, answered = made["messages"][1]["content"][2], made["messages"][2]["content"][0]
    assert used["toolUse"]["toolUseId"] == answered["toolResult"]["toolUseId"] == "call.1"
    assert kinds(answered["toolResult"]) == ["json", "image"]
    assert made["toolConfig"]["toolChoice"] == {"tool": {"name": "look"}}
    assert made["toolConfig"]["tools"][1]["toolSpec"]["strict"]
    own = {"tool_choice": {"disable_parallel_tool_use": True}} if model == CLAUDE else None
    assert made.get("additionalModelRequestFields") == own


@pytest.mark.parametrize(
    ("model", "settings", "own", "effort"),
    [
        (CLAUDE, {}, None, None),
        (CLAUDE, {"reasoning_effort": "none"}, {"thinking": {"type": "disabled"}}, None),
        (CLAUDE, {"reasoning_effort": "minimal"}, {"thinking": {"type": "adaptive"}}, "low"),
        (
            CLAUDE,
            {"reasoning_budget": 2048},
            {"thinking": {"type": "enabled", "budget_tokens": 2048}},
            None,
        ),
        (
            NOVA,
            {"reasoning_effort": "high"},
            {"reasoningConfig": {"type": "enabled", "maxReasoningEffort": "high"}},
            None,
        ),
        (NOVA, {"reasoning_effort": "none"}, {"reasoningConfig": {"type": "disabled"}}, None),
        (GPT, {"reasoning_effort": "low"}, {"reasoning_effort": "low"}, None),
        (PROFILE, {"reasoning_effort": "high"}, None, "high"),
    ],
)
def test_reasoning_is_requested_as_the_family_of_the_model_takes_it(
    model: str, settings: dict[str, Any], own: Any, effort: str | None
) -> None:
    made = body(model=model, settings=settings)
    assert made.get("additionalModelRequestFields") == own
    assert made.get("outputConfig", {}).get("effort") == effort


def test_a_call_is_not_forced_while_the_model_thinks() -> None:
    made = body(
        tools=(LOOK,),
        tool_choice="any",
        parallel_tool_calls=False,
        settings={"reasoning_effort": "low"},
    )
    assert "toolChoice" not in made["toolConfig"]
    own = made["additionalModelRequestFields"]
    assert own["tool_choice"] == {"type": "auto", "disable_parallel_tool_use": True}


def test_points_stand_at_the_fixed_beginning_and_at_the_ends_of_the_last_two_user_turns() -> None:
    paper = {"document": {"name": "a", "source": {"text": "x"}}}
    talk: tuple[Message, ...] = (Message.system("s"), Message.user([{"text": "a"}, paper]))
    for _ in range(2):
        talk += (Message.assistant("", (CALL,)), Message.tool(CALL, "x"))
    made = body(*talk, tools=(LOOK,))
    assert made["system"][-1] == POINT
    assert [kinds(turn) for turn in made["messages"] if turn["role"] == "user"] == [
        ["text", "document"],
        ["toolResult", "cachePoint"],
        ["toolResult", "cachePoint"],
    ]
    assert kinds(body(*talk[:2])["messages"][0]) == ["text", "cachePoint", "document"]
    assert body(tools=(LOOK,))["toolConfig"]["tools"][-1] == POINT
    assert POINT not in body(model=NOVA, tools=(LOOK,))["toolConfig"]["tools"]
    for model in (LLAMA, PROFILE, "anthropic.claude-3-haiku-20240307-v1:0"):
        assert b"cachePoint" not in orjson.dumps(body(*talk, model=model, tools=(LOOK,)))
    assert b"cachePoint" not in orjson.dumps(body(*talk, settings={"prompt_cache": False}))


def test_cache_points_of_the_user_are_the_only_ones() -> None:
    """Ours would come before theirs with a shorter time, and there may be four in all."""
    point = {"cachePoint": {"type": "default", "ttl": "1h"}}
    asked = Message.user([{"text": "long"}, point, {"text": "and"}])
    made = body(Message.system("s"), asked, tools=(LOOK,))
    assert orjson.dumps(made).count(b"cachePoint") == 1
    assert made["messages"][0]["content"][1] == point


def test_documents_get_names_that_the_service_takes_and_a_text_beside_them() -> None:
    given = ["../a  b_c.pdf", "a b c pdf", "ü" * 300, "", "x" * 300]
    papers = [{"document": {"name": name, "source": {"bytes": "JVBERi0="}}} for name in given]
    made = body(Message.user(papers))["messages"][0]["content"]
    names = [block["document"]["name"] for block in made if "document" in block]
    assert names == ["a b c pdf", "a b c pdf (2)", "document", "document (4)", "x" * 190]
    assert {"text": "(a document)"} in made


def test_without_tools_calls_and_results_are_sent_as_text() -> None:
    """The service refuses calls in a conversation without tools, and has no choice of none."""
    reasoning = {"reasoning": {"provider": "bedrock/claude", "at": 0, "data": SIGNED}}
    talk = (
        Message.user("hi"),
        Message.assistant([reasoning], (CALL,)),
        Message(role=Role.TOOL, content=[{"json": {"n": 1}}], tool_call_id=CALL.id),
    )
    for made in (body(*talk), body(*talk, tools=(LOOK,), tool_choice="none")):
        assert "toolConfig" not in made
        texts = [block.get("text") for turn in made["messages"][1:] for block in turn["content"]]
        told = ['{"tool":"look","arguments":{"a":"é"}}', "Result of look:", '{"n":1}', None]
        assert texts == told  # the last one is a cache point


def test_extra_body_overrules_and_texts_of_whitespace_are_left_out() -> None:
    config = {"guardrailIdentifier": "gr1", "guardrailVersion": "1"}
    blank = Message.assistant("\n", (CALL,))
    made = body(
        Message.system(" "),
        Message.user("hi"),
        blank,
        Message.tool(CALL, "\n"),
        tools=(LOOK,),
        settings={"extra_body": {"guardrailConfig": config}},
    )
    assert made["guardrailConfig"] == config
    assert "system" not in made
    assert kinds(made["messages"][1]) == ["toolUse"]


def test_cited_text_is_text() -> None:
    cited = {"citationsContent": {"content": [{"text": "b"}, 1], "citations": []}}
    payload = {"output": {"message": {"content": [{"text": "a"}, cited, {"text": "c"}]}}}
    assert parse_converse(payload, CLAUDE).content == "abc"


def test_reasoning_goes_back_only_if_signed_and_to_no_other_family() -> None:
    unsigned = {"reasoningContent": {"reasoningText": {"text": "Hm."}}}
    hidden = {"reasoningContent": {"redactedContent": "enp6"}}
    content = [SIGNED, unsigned, {"text": "a"}, hidden]
    content.append({"toolUse": {"toolUseId": "t1", "name": "look", "input": {"x": 1}}})
    payload = {"output": {"message": {"content": content}}, "stopReason": "tool_use"}
    answer = parse_converse(payload, CLAUDE)
    assert (answer.content, answer.model) == ("a", CLAUDE)
    assert answer.reasoning_text == "Hm.Hm."  # readable, signed or not
    assert answer.tool_calls == (ToolCall(id="t1", name="look", arguments={"x": 1}),)
    talk: tuple[Message, ...] = (Message.user("hi"),)
    talk += (Message.assistant(answer.as_content, answer.tool_calls),)
    talk += (Message.tool(answer.tool_calls[0], "x"),)
    back = body(*talk, tools=(LOOK,))["messages"][1]["content"]
    assert [back[0], back[2]] == [SIGNED, hidden]
    assert [kind for block in back for kind in block][1::2] == ["text", "toolUse"]
    assert "reasoningContent" not in str(body(*talk, model=NOVA, tools=(LOOK,)))


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("end_turn", FinishReason.STOP),
        ("stop_sequence", FinishReason.STOP),
        ("max_tokens", FinishReason.LENGTH),
        ("model_context_window_exceeded", FinishReason.LENGTH),
        ("guardrail_intervened", FinishReason.CONTENT_FILTER),
        ("content_filtered", FinishReason.CONTENT_FILTER),
        (None, FinishReason.OTHER),
        ([], FinishReason.OTHER),
    ],
)
def test_finish_reasons(reason: Any, expected: FinishReason) -> None:
    content = [{"text": "x"}, {"citationsContent": {"content": True}}]
    payload = {"output": {"message": {"content": content}}, "stopReason": reason}
    assert parse_converse(payload, "m").finish_reason is expected


@pytest.mark.parametrize(
    "payload",
    [
        {},
        {"output": {"message": {"content": "text"}}},
        {"output": {"message": {"content": [1]}}},
        {"output": {"message": {"content": []}}, "stopReason": "malformed_tool_use"},
        {
            "output": {"message": {"content": [{"text": "I will call it"}]}},
            "stopReason": "malformed_tool_use",
        },
        {
            "output": {"message": {"content": [{"text": "I will call it"}]}},
            "stopReason": "malformed_model_output",
        },
    ],
)
def test_an_answer_that_is_none_is_malformed_and_tried_again(payload: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="malformed") as raised:
        parse_converse(payload, "m")
    assert raised.value.retryable


def test_tokens_read_from_and_written_to_the_cache_are_prompt_tokens() -> None:
    counts = {"inputTokens": 10, "outputTokens": 5, "cacheReadInputTokens": 100}
    usage = usage_of({**counts, "cacheWriteInputTokens": 1000})
    assert usage is not None
    assert (usage.prompt_tokens, usage.cached_tokens, usage.cache_write_tokens) == (1110, 100, 1000)
    assert usage.cache_write_1h_tokens == 0


@pytest.mark.parametrize(
    ("details", "for_hour"),
    [
        ([{"ttl": "5m", "inputTokens": 300}, {"ttl": "1h", "inputTokens": 700}], 700),
        ([{"ttl": "5m", "inputTokens": 1000}], 0),
        ([{"ttl": "1h"}, None], 0),
        ("1h", 0),
    ],
)
def test_what_is_written_to_the_cache_for_an_hour_is_counted_apart(
    details: Any, for_hour: int
) -> None:
    counts = {"inputTokens": 10, "outputTokens": 5, "cacheWriteInputTokens": 1000}
    usage = usage_of({**counts, "cacheDetails": details})
    assert usage is not None
    assert (usage.cache_write_tokens, usage.cache_write_1h_tokens) == (1000, for_hour)


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with ModelServer() as running:
        yield running


@pytest.fixture
def client(server: ModelServer) -> Any:
    session = botocore.session.Session()
    session.set_credentials("key", "secret")
    url = server.url.removesuffix("/v1")
    config = Config(retries={"total_max_attempts": 1})
    return session.create_client("bedrock-runtime", "eu-west-1", endpoint_url=url, config=config)


def test_botocores_client_understands_the_model_server(server: ModelServer, client: Any) -> None:
    """So what our tests are answered with has the form of the service's answers."""
    call = ToolCallReply("look", {"a": [1, "é"]})
    server.script("hi", Reply("Hello!", (call,), reasoning="Hm.", piece=3))
    request = ModelRequest(model=PROFILE, messages=(Message.user("hi"),), tools=(LOOK,))
    asked = {**request_body(request), "modelId": PROFILE}
    whole = client.converse(**asked)
    assert whole["stopReason"] == "tool_use"
    assert whole["ResponseMetadata"]["RequestId"] == "req-1"
    content = whole["output"]["message"]["content"]
    assert [next(iter(block)) for block in content] == ["reasoningContent", "text", "toolUse"]
    events = list(client.converse_stream(**asked)["stream"])
    streamed = CONVERSE.stream()
    pieces = [streamed.add(orjson.dumps(event)) for event in events]
    assert "".join(pieces) == "Hello!"
    same = {"usage", "raw"}
    first = parse_converse(streamed.payload(), PROFILE)
    assert first.model_dump(exclude=same) == parse_converse(whole, PROFILE).model_dump(exclude=same)
    assert [one.arguments for one in first.tool_calls or ()] == [call.arguments]
    server.fail("rate_limited", attempt=None)
    with pytest.raises(ClientError, match="ThrottlingException"):
        client.converse(**asked)
    with pytest.raises((ClientError, EventStreamError), match="ThrottlingException"):
        client.converse_stream(**asked)


@pytest.mark.parametrize("start", [None, {}, {"toolUse": None}, "x"])
def test_a_block_may_start_with_nothing(start: Any) -> None:
    answer = StreamedConverse()
    for event in (
        {"contentBlockStart": {"contentBlockIndex": 0, "start": start}},
        {"contentBlockStart": {"contentBlockIndex": 1}},
        {"contentBlockDelta": {"contentBlockIndex": 0, "delta": {"text": "Hel"}}},
        {"contentBlockDelta": {"contentBlockIndex": 1, "delta": {"text": "lo"}}},
        {"messageStop": {"stopReason": "end_turn"}},
    ):
        answer.add(orjson.dumps(event))
    assert parse_converse(answer.payload(), "m").content == "Hello"


def test_encrypted_reasoning_that_is_no_text_is_malformed() -> None:
    answer = StreamedConverse()
    piece = {"contentBlockIndex": 0, "delta": {"reasoningContent": {"redactedContent": "é"}}}
    answer.add(orjson.dumps({"contentBlockDelta": piece}))
    answer.add(orjson.dumps({"contentBlockDelta": piece}))
    answer.add(orjson.dumps({"messageStop": {"stopReason": "end_turn"}}))
    with pytest.raises(ModelError, match="base64"):
        answer.payload()
