"""What a service must get back with an answer: kept with it, and sent to its own model alone."""

from typing import Any

import orjson
import pytest

from stepfleet.orchestrator import LLMResponse, Message, ModelRequest
from stepfleet.orchestrator.models.endpoint import endpoint_of
from stepfleet.orchestrator.models.services import SERVICES
from stepfleet.worker.models.anthropic import parse_message
from stepfleet.worker.models.anthropic import request_body as messages
from stepfleet.worker.models.openai.chat import CHAT_COMPLETIONS, chat_of, parse_completion
from stepfleet.worker.models.openai.stream import StreamedCompletion
from stepfleet.worker.models.responses import parse_response
from stepfleet.worker.models.responses import request_body as responses
from stepfleet.worker.models.sent_back import MOST_KEPT

SIGNED: dict[str, Any] = {"extra_content": {"google": {"thought_signature": "c2ln"}}}


def specific(signature: str) -> dict[str, Any]:
    return {"provider_specific_fields": {"thought_signature": signature}}


SPECIFIC = specific("c2ln")
TEXTS = {"provider_specific_fields": {"thought_signatures": ["dGV4dA=="]}}
THOUGHTS = [
    {"type": "thinking", "thinking": "Let me see.", "signature": "c2ln"},
    {"type": "redacted_thinking", "data": "AAA"},
    {"type": "redacted_thinking", "data": "BBB"},
    {"type": "thinking", "thinking": "So.", "signature": "Z24="},
]
DETAILS = {"reasoning_details": [{"type": "reasoning.text", "text": "Hm.", "index": 0}]}
GOOGLE = "https://generativelanguage.googleapis.com/v1beta/openai"


def call(name: str = "call_1", **fields: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": "{}"}
    return {"id": name, "type": "function", "function": function, **fields}


def whole(*calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": "So.", "tool_calls": list(calls), **fields}
    return {"model": "m", "choices": [{"message": message, "finish_reason": "tool_calls"}]}


def streamed(*deltas: dict[str, Any]) -> dict[str, Any]:
    answer = StreamedCompletion()
    for one in deltas:
        answer.add(orjson.dumps({"choices": [{"delta": one}]}))
    answer.add(b"[DONE]")
    return answer.payload()


def sent_after(
    payload: dict[str, Any], model: str = "litellm:m", first: str = "litellm:m", url: str = ""
) -> list[dict[str, Any]]:
    """Return what `model` is sent after an answer of the model `first`, stored in between."""
    service, _, name = first.partition(":")
    wanted = SERVICES[service].reasoning
    answer = parse_completion(payload, name, reasoning=wanted, service=service)
    stored = LLMResponse.from_json(answer.to_json())
    calls = stored.tool_calls or ()
    results = [Message.tool(one, "seen") for one in calls]
    talk = (Message.user("hi"), Message.assistant(stored.as_content, calls), *results)
    service, _, name = model.partition(":")
    settings = {"base_url": url or "http://127.0.0.1:9/v1"}
    request = ModelRequest.model_validate({"model": name, "messages": talk, "settings": settings})
    endpoint = endpoint_of(request.settings, {}, SERVICES[service])
    body = chat_of(CHAT_COMPLETIONS, service, SERVICES[service].reasoning).body(request, endpoint)
    sent: list[dict[str, Any]] = orjson.loads(body)["messages"]
    return sent[1:]


@pytest.mark.parametrize("kept", [SIGNED, SPECIFIC])
def test_a_signature_goes_back_with_its_call(kept: dict[str, Any]) -> None:
    answer, *_ = sent_after(whole(call("call_1", **kept), call("call_2")))
    assert answer["content"] == "So."
    assert answer["tool_calls"] == [call("call_1", **kept), call("call_2")]


def test_a_signature_in_the_function_goes_back_with_its_call() -> None:
    given = call()
    given["function"] = {**given["function"], **SPECIFIC}
    answer, *_ = sent_after(whole(given))
    assert answer["tool_calls"] == [call(**SPECIFIC)]


def test_a_signature_that_a_server_gives_in_three_places_is_kept_once() -> None:
    signature = "A" * 3000
    given = call(f"call_1__thought__{signature}", **specific(signature))
    listed = {"provider_specific_fields": {"thought_signatures": [signature, 7, {}]}}
    payload = whole(7, given, **listed)  # type: ignore[arg-type]
    answer, *_ = sent_after(payload)
    assert "provider_specific_fields" not in answer
    assert answer["tool_calls"][1].pop("id") != given.pop("id")
    assert answer["tool_calls"][1] == given
    kept = parse_completion(payload, "m", service="litellm").reasoning
    assert str(kept).count(signature) == 1


@pytest.mark.parametrize("fields", [SIGNED, TEXTS, {"thinking_blocks": THOUGHTS}])
def test_what_belongs_to_the_text_goes_back_with_it(fields: dict[str, Any]) -> None:
    answer, _ = sent_after(whole(call(), **fields))
    assert {name: answer[name] for name in fields} == fields


def test_a_signature_in_a_long_id_goes_back_and_the_results_bear_it() -> None:
    """LiteLLM puts Gemini's signature into the id, which we store under a shorter one."""
    long = "call_1__thought__" + "A" * 3000
    answer, first, second = sent_after(whole(call(long), call("call_2")))
    assert [one["id"] for one in answer["tool_calls"]] == [long, "call_2"]
    assert (first["tool_call_id"], second["tool_call_id"]) == (long, "call_2")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("litellm:m", "groq:m"), ("litellm:m", "mistral:m"), ("compatible:m", "compatible:other"),
        ("openai:m", "compatible:m"),
    ],
)  # fmt: skip
def test_no_other_model_gets_it(first: str, second: str) -> None:
    payload = whole(call("x" * 600, **SIGNED, **SPECIFIC), **SIGNED, thinking_blocks=THOUGHTS)
    answer, result = sent_after(payload, second, first)
    assert answer.keys() == {"role", "content", "tool_calls"}
    (sent,) = answer["tool_calls"]
    assert sent.keys() == {"id", "type", "function"}
    assert result["tool_call_id"] == sent["id"] != "x" * 600


@pytest.mark.parametrize(
    ("model", "url", "given", "expected"),
    [
        ("compatible:m", "", {"reasoning_content": "Hm."}, {"reasoning_content": "Hm."}),
        ("compatible:m", "", {"reasoning_content": ""}, {"reasoning_content": ""}),
        ("deepseek:m", "", {"reasoning_content": ""}, {"reasoning_content": ""}),
        ("vllm:m", "", {"reasoning": "Hm."}, {"reasoning": "Hm."}),
        ("vllm:m", "", {"reasoning_content": "", "reasoning": "Hm."}, {"reasoning": "Hm."}),
        ("openai:m", "", {"reasoning_content": "Hm."}, {"reasoning_content": "Hm."}),
        ("openrouter:m", "", {"reasoning": "Hm."}, {"reasoning": "Hm."}),
        ("openrouter:m", "", {"reasoning": "Hm.", **DETAILS}, DETAILS),
        ("litellm:m", "", {"reasoning_content": "H", "thinking_blocks": THOUGHTS},
         {"thinking_blocks": THOUGHTS}),
        ("compatible:m", "", {"reasoning_content": 7, "reasoning": None}, {}),
        ("groq:m", "", {"reasoning": "Hm."}, {}),
        ("compatible:m", "https://api.groq.com/openai/v1", {"reasoning": "Hm."}, {}),
        ("mistral:m", "", {"reasoning_content": "Hm."}, {}),
        ("azure:m", "", {"reasoning_content": "Hm."}, {}),
        ("compatible:m", "https://a.openai.azure.com/v1", {"reasoning_content": "Hm."}, {}),
    ],
)  # fmt: skip
def test_the_reasoning_before_calls_goes_back_as_it_came(
    model: str, url: str, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    """Kimi and DeepSeek refuse calls without it, others ignore it, and a few refuse the field."""
    pieces = streamed(given, {"content": "So.", "tool_calls": [{"index": 0, **call()}]})
    for payload in (whole(call(), **given), pieces):
        answer, _ = sent_after(payload, model, model, url)
        assert answer == {"role": "assistant", "content": "So.", "tool_calls": [call()], **expected}


def test_the_reasoning_of_an_answer_without_calls_stays_here() -> None:
    (answer,) = sent_after(whole(reasoning_content="Hm."), "compatible:m", "compatible:m")
    assert answer == {"role": "assistant", "content": "So."}


def test_it_is_the_same_whether_the_answer_came_whole_or_in_pieces() -> None:
    pieces = streamed(
        {"thinking_blocks": [{"type": "thinking", "thinking": "Let me ", "signature": ""}]},
        {"thinking_blocks": [{"type": "thinking", "thinking": "see.", "signature": None}]},
        {"thinking_blocks": [{"type": "thinking", "thinking": "", "signature": "c2ln"}]},
        {"thinking_blocks": [{"type": "redacted_thinking", "data": "AAA"}]},
        {"thinking_blocks": [{"type": "redacted_thinking", "data": "BBB"}]},
        {"thinking_blocks": [{"type": "thinking", "thinking": "So.", "signature": "Z24="}]},
        {"content": "So.", **SIGNED, "provider_specific_fields": None},
        {"tool_calls": [{"index": 0, **call("call_1", **SIGNED)}]},
        {"tool_calls": [{"index": 1, **call("call_2")}]},
        {"tool_calls": [{"index": 1, "function": {}, **SPECIFIC}]},
        TEXTS,
    )
    one = whole(
        call("call_1", **SIGNED), call("call_2", **SPECIFIC), **SIGNED, **TEXTS,
        thinking_blocks=THOUGHTS,
    )  # fmt: skip
    assert sent_after(pieces) == sent_after(one)


def test_calls_of_another_model_are_signed_for_gemini_as_google_asks() -> None:
    foreign = {"google": {"thought_signature": "skip_thought_signature_validator"}}
    payload = whole(call("call_1"), call("call_2"))
    answer, *_ = sent_after(payload, "compatible:gemini-3-pro", "openai:m", GOOGLE)
    assert [one.get("extra_content") for one in answer["tool_calls"]] == [foreign, None]
    answer, *_ = sent_after(payload, "compatible:gemini-3-pro", "openai:m")
    assert "extra_content" not in str(answer)


def test_a_signed_call_keeps_its_own_signature_for_gemini() -> None:
    model = "openai:gemini-3-pro"
    answer, _ = sent_after(whole(call(**SIGNED)), model, model, GOOGLE)
    assert answer["tool_calls"] == [call(**SIGNED)]


def test_an_id_that_repeats_goes_back_once() -> None:
    long = "functions.look:" + "0" * 60
    answer, *_ = sent_after(whole(call(long, **SIGNED), call(long, **SIGNED)))
    first, second = answer["tool_calls"]
    assert first["id"] == long != second["id"]
    assert first["extra_content"] == second["extra_content"]


NESTED: dict[str, Any] = {}
for _ in range(200):
    NESTED = {"a": NESTED}


@pytest.mark.parametrize(
    "extra",
    [
        None, 7, [], {}, "x", [7], NESTED, {"a": "x" * MOST_KEPT}, {"a": ["b"] * 100_000},
        {"a": float("nan")}, {"a": "\ud800"},
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_left_out_and_loses_no_answer(extra: Any) -> None:
    fields = {"extra_content": extra, "provider_specific_fields": extra, "thinking_blocks": extra}
    payload = whole(call(**fields), **fields)
    answer, result = sent_after(payload)
    assert answer["tool_calls"] == [call()]
    assert (answer["content"], result["content"]) == ("So.", "seen")
    assert len(parse_completion(payload, "m", service="litellm").to_json()) < 2000


LONG = "call_1__thought__" + "A" * 3000


def test_a_signature_in_a_long_id_goes_back_in_responses_too() -> None:
    item = {"type": "function_call", "call_id": LONG, "name": "look", "arguments": "{}"}
    answer = parse_response({"status": "completed", "output": [item]}, "m")
    stored = LLMResponse.from_json(answer.to_json())
    (made,) = stored.tool_calls or ()
    assert made.id != LONG
    talk = (Message.assistant(stored.as_content, (made,)), Message.tool(made, "seen"))
    own, other = (
        responses(ModelRequest(model=model, messages=talk))["input"] for model in ("m", "other")
    )
    assert [one["call_id"] for one in own] == [LONG, LONG]
    assert [one["call_id"] for one in other] == [made.id, made.id]


def test_a_signature_of_a_call_goes_back_in_messages_too() -> None:
    signed = {"provider_specific_fields": {"signature": "c2ln"}}
    use = {"type": "tool_use", "id": "call_1", "name": "look", "input": {}}
    answer = parse_message({"content": [{**use, **signed}]}, "m")
    stored = LLMResponse.from_json(answer.to_json())
    (made,) = stored.tool_calls or ()
    talk = (Message.user("hi"), Message.assistant(stored.as_content, (made,)))
    own, other = (
        messages(ModelRequest(model=model, messages=talk))["messages"][1]["content"]
        for model in ("m", "other")
    )
    assert own == [{**use, **signed}]
    assert other == [use]
