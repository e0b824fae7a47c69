"""The tier that an answer names, in each protocol, whole and streamed."""

from collections.abc import Callable
from typing import Any

import orjson
import pytest

from stepfleet.orchestrator import LLMResponse
from stepfleet.worker.models.anthropic import StreamedMessage, parse_message
from stepfleet.worker.models.bedrock.converse import StreamedConverse, parse_converse
from stepfleet.worker.models.google import StreamedContent, parse_content
from stepfleet.worker.models.openai.chat import parse_completion
from stepfleet.worker.models.openai.stream import StreamedCompletion
from stepfleet.worker.models.responses import StreamedResponse, parse_response

Read = Callable[[Any], LLMResponse]


def of_chat(tier: Any) -> LLMResponse:
    choice = {"message": {"content": "yes"}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": 1}
    payload = {"choices": [choice], "usage": usage, "service_tier": tier}
    return parse_completion(payload, "m")


def of_messages(tier: Any) -> LLMResponse:
    usage = {"input_tokens": 3, "output_tokens": 1, "service_tier": tier}
    block = {"type": "text", "text": "yes"}
    return parse_message({"content": [block], "stop_reason": "end_turn", "usage": usage}, "m")


def of_google(tier: Any) -> LLMResponse:
    usage = {"promptTokenCount": 3, "candidatesTokenCount": 1, "serviceTier": tier}
    candidate = {"content": {"parts": [{"text": "yes"}]}, "finishReason": "STOP"}
    return parse_content({"candidates": [candidate], "usageMetadata": usage}, "m")


def of_converse(tier: Any) -> LLMResponse:
    usage = {"inputTokens": 3, "outputTokens": 1, "totalTokens": 4}
    output = {"message": {"role": "assistant", "content": [{"text": "yes"}]}}
    ended = {"stopReason": "end_turn", "usage": usage, "serviceTier": {"type": tier}}
    return parse_converse({"output": output, **ended}, "m")


def of_responses(tier: Any) -> LLMResponse:
    content = [{"type": "output_text", "text": "yes"}]
    usage = {"input_tokens": 3, "output_tokens": 1, "total_tokens": 4}
    item = {"type": "message", "content": content}
    answer = {"output": [item], "status": "completed", "usage": usage, "service_tier": tier}
    return parse_response(answer, "m")


def streamed(stream: Any, *events: Any) -> Any:
    for event in events:
        stream.add(orjson.dumps(event))
    return stream.payload()


def of_streamed_chat(tier: Any) -> LLMResponse:
    """The first events name the tier that was asked for, the later ones that of the answer."""
    choice = {"delta": {"content": "yes"}, "finish_reason": "stop"}
    events = ({"service_tier": "auto", "choices": []}, {"choices": [choice], "service_tier": tier})
    return parse_completion(streamed(StreamedCompletion(), *events), "m")


def of_streamed_messages(tier: Any) -> LLMResponse:
    usage = {"input_tokens": 3, "output_tokens": 1, "service_tier": tier}
    begun = {"type": "message_start", "message": {"usage": usage, "content": []}}
    delta = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {}}
    end = {"type": "message_stop"}
    return parse_message(streamed(StreamedMessage(), begun, delta, end), "m")


def of_streamed_google(tier: Any) -> LLMResponse:
    usage = {"promptTokenCount": 3, "candidatesTokenCount": 1, "serviceTier": tier}
    candidate = {"content": {"parts": [{"text": "yes"}]}, "finishReason": "STOP"}
    event = {"candidates": [candidate], "usageMetadata": usage}
    return parse_content(streamed(StreamedContent(), event), "m")


def of_streamed_converse(tier: Any) -> LLMResponse:
    text = {"contentBlockDelta": {"contentBlockIndex": 0, "delta": {"text": "yes"}}}
    usage = {"inputTokens": 3, "outputTokens": 1}
    last = {"metadata": {"usage": usage, "serviceTier": {"type": tier}}}
    events = (text, {"messageStop": {"stopReason": "end_turn"}}, last)
    return parse_converse(streamed(StreamedConverse(), *events), "m")


def of_streamed_responses(tier: Any) -> LLMResponse:
    content = [{"type": "output_text", "text": "yes"}]
    output = [{"type": "message", "content": content}]
    answer = {"output": output, "status": "completed", "service_tier": tier}
    event = {"type": "response.completed", "response": answer}
    return parse_response(streamed(StreamedResponse(), event), "m")


WHOLE = (of_chat, of_messages, of_google, of_converse, of_responses)
STREAMED = (
    *(of_streamed_chat, of_streamed_messages, of_streamed_google, of_streamed_converse),
    of_streamed_responses,
)


@pytest.mark.parametrize("read", [*WHOLE, *STREAMED])
@pytest.mark.parametrize("tier", ["flex", "priority", "batch", "unheard_of"])
def test_an_answer_keeps_the_tier_that_it_names(read: Read, tier: str) -> None:
    """LANE-01: five protocols, flex, priority, batch, unknown tier."""
    assert read(tier).service_tier == tier


@pytest.mark.parametrize("read", [*WHOLE, *STREAMED])
@pytest.mark.parametrize("tier", ["default", "standard", None, 3, ["flex"], ""])
def test_the_standard_tier_and_what_is_no_word_are_nothing_to_keep(read: Read, tier: Any) -> None:
    """LANE-01"""
    answer = read(tier)
    assert answer.service_tier == ""
    assert "service_tier" not in answer.to_json()


def test_anthropics_fast_mode_and_vertexs_traffic_are_tiers() -> None:
    """LANE-01"""
    fast = {"input_tokens": 3, "output_tokens": 1, "service_tier": "standard", "speed": "fast"}
    block = {"type": "text", "text": "yes"}
    assert parse_message({"content": [block], "usage": fast}, "m").service_tier == "fast"
    usage = {"promptTokenCount": 3, "candidatesTokenCount": 1, "trafficType": "ON_DEMAND_FLEX"}
    candidate = {"content": {"parts": [{"text": "yes"}]}, "finishReason": "STOP"}
    answer = parse_content({"candidates": [candidate], "usageMetadata": usage}, "m")
    assert answer.service_tier == "flex"
