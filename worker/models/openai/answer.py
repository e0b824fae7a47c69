"""Reads a chat completion into an `LLMResponse`. Pure; what does not fit raises `ModelError`.

A malformed answer is a transient failure: the same request usually gets a sound one.
"""

from typing import Any, TypeGuard

from stepfleet.orchestrator.records.calls.tools import ToolCall
from stepfleet.orchestrator.records.conversation.messages import Block
from stepfleet.orchestrator.records.responses import LLMResponse
from stepfleet.orchestrator.records.steps import FinishReason
from stepfleet.orchestrator.records.usage import UsageStats, token_count
from stepfleet.orchestrator.tools import drop_leaked_arguments, parse_tool_calls
from stepfleet.worker.attempt.sanitize import new_call_id
from stepfleet.worker.models.bodies import malformed, reasoning_block, shown_reasoning
from stepfleet.worker.models.openai.stream import REASONING_DETAILS, REASONING_FIELDS
from stepfleet.worker.models.sent_back import kept_of, model_at

_LONGEST_NAME = 512
"""Characters of a model's name; it is stored with each step, whatever the server put there."""

_REASONS = {
    "stop": FinishReason.STOP,
    "eos": FinishReason.STOP,
    "eos_token": FinishReason.STOP,
    "end_turn": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "max_tokens": FinishReason.LENGTH,
    "tool_calls": FinishReason.TOOL_CALLS,
    "function_call": FinishReason.TOOL_CALLS,
    "tool_use": FinishReason.TOOL_CALLS,
    "content_filter": FinishReason.CONTENT_FILTER,
    "safety": FinishReason.CONTENT_FILTER,
    "error": FinishReason.ERROR,
}


def parse_completion(
    payload: dict[str, Any], default_model: str, reasoning: str = "", service: str = ""
) -> LLMResponse:
    """Return the first choice of a completion as the fleet's answer.

    `default_model` names the model when the payload does not; `reasoning` the field that its
    `service` wants back.
    """
    choice = _first_choice(payload)
    message = choice.get("message")
    if not isinstance(message, dict):
        raise malformed("the first choice has no message")
    calls = _tool_calls(message.get("tool_calls"))
    refusal = message.get("refusal")
    text = _text(message.get("content"))
    reason = finish_reason(choice.get("finish_reason"), asks_for_tools=bool(calls))
    if not text and not calls and isinstance(refusal, str) and refusal:
        text, reason = refusal, FinishReason.CONTENT_FILTER
    model = payload.get("model")
    return LLMResponse.model_construct(
        content=drop_leaked_arguments(text, calls) if text and calls else text,
        tool_calls=calls or None,
        usage=usage_of(payload.get("usage")),
        model=model if _is_name(model) else default_model,
        finish_reason=reason,
        reasoning=(
            *(_sent_back(message, reasoning) if reasoning else ()),
            *kept_of(message, message.get("tool_calls"), model_at(service, default_model)),
        ),
        reasoning_text=shown_reasoning(_reasoning(message)),
        raw=payload,
    )


def finish_reason(reason: Any, *, asks_for_tools: bool) -> FinishReason:
    """Return the reason in the fleet's words; `stop` beside calls is corrected."""
    known = _REASONS.get(reason.lower(), FinishReason.OTHER) if isinstance(reason, str) else None
    if asks_for_tools and known in (None, FinishReason.STOP):
        return FinishReason.TOOL_CALLS
    return known or FinishReason.OTHER


def usage_of(usage: Any) -> UsageStats | None:
    """Return the token counts of one call, or None when they are absent or no counts."""
    if not isinstance(usage, dict):
        return None
    prompt = token_count(usage.get("prompt_tokens"))
    completion = token_count(usage.get("completion_tokens"))
    if prompt is None or completion is None:
        return None
    total = token_count(usage.get("total_tokens"))
    return UsageStats.model_construct(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion if total is None else total,
        llm_calls=1,
        cached_tokens=_detail(usage, "prompt_tokens_details", "cached_tokens"),
        reasoning_tokens=_detail(usage, "completion_tokens_details", "reasoning_tokens"),
        audio_tokens=_detail(usage, "prompt_tokens_details", "audio_tokens")
        + _detail(usage, "completion_tokens_details", "audio_tokens"),
    )


def _reasoning(message: dict[str, Any]) -> list[str]:
    """Return the texts in which a model of a compatible server reasoned."""
    for field in REASONING_FIELDS:
        if isinstance(text := message.get(field), str) and text:
            return [text]
    details = message.get(REASONING_DETAILS)
    items = [one for one in details if isinstance(one, dict)] if isinstance(details, list) else []
    found = (one.get("text") or one.get("summary") for one in items)
    return [text for text in found if isinstance(text, str)]


def _sent_back(message: dict[str, Any], field: str) -> tuple[Block, ...]:
    value = message.get(field)
    return (reasoning_block(field, 0, {field: value}),) if value else ()


def _is_name(model: Any) -> TypeGuard[str]:
    return isinstance(model, str) and 0 < len(model) <= _LONGEST_NAME


def _first_choice(payload: dict[str, Any]) -> dict[str, Any]:
    choices = payload.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise malformed("it has no choices")
    return choices[0]


def _tool_calls(raw: Any) -> tuple[ToolCall, ...]:
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise malformed("tool_calls is not a list")
    return parse_tool_calls(raw, new_id=new_call_id)


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part["text"] for part in content if isinstance(part, dict) and "text" in part]
        if all(isinstance(part, str) for part in parts):
            return "".join(parts)
    raise malformed("the message's content is not text")


def _detail(usage: dict[str, Any], group: str, name: str) -> int:
    details = usage.get(group)
    return (token_count(details.get(name)) if isinstance(details, dict) else None) or 0
