"""OpenAI's Chat Completions API: what its answers mean, and the format of its calls."""

from dataclasses import replace
from functools import partial
from typing import Any, TypeGuard

from stepfleet.orchestrator.models.endpoint import ROUTES, Endpoint
from stepfleet.orchestrator.models.pricing.prices import tier_of
from stepfleet.orchestrator.models.services import Api
from stepfleet.orchestrator.records.calls.tools import ToolCall
from stepfleet.orchestrator.records.conversation.messages import Block
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest
from stepfleet.orchestrator.records.steps import FinishReason
from stepfleet.orchestrator.records.usage import UsageStats
from stepfleet.orchestrator.tools import drop_leaked_arguments, parse_tool_calls
from stepfleet.worker.attempt.sanitize import new_call_id
from stepfleet.worker.models.bodies import (
    APART,
    broken_off,
    completed_counts,
    count_in,
    encode,
    malformed,
    parse_body,
    reasoning_block,
    shown_reasoning,
    usage_within,
    word,
)
from stepfleet.worker.models.http_model import Format
from stepfleet.worker.models.openai.request import Dialect, request_body
from stepfleet.worker.models.openai.stream import (
    CUT,
    REASONING_DETAILS,
    StreamedCompletion,
    choices_of,
    failure_in,
    has_tags,
    images_in,
    leading_thought,
    older_call,
    text_in,
    text_message,
    thoughts_in,
    transcript_of,
)
from stepfleet.worker.models.sent_back import REASONING_FIELDS, kept_of, model_at

_LONGEST_NAME = 512
"""Characters of a model's name; it is stored with each step, whatever the server put there."""

_REFUSALS = (
    "content_filter content-filter safety refusal sensitive recitation blocklist"
    " prohibited_content spii language guardrail_intervened"
)
_REASONS = {
    "stop": FinishReason.STOP,
    "eos": FinishReason.STOP,
    "eos_token": FinishReason.STOP,
    "end_turn": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "tool_calls": FinishReason.TOOL_CALLS,
    "function_call": FinishReason.TOOL_CALLS,
    "tool_use": FinishReason.TOOL_CALLS,
    **dict.fromkeys(CUT, FinishReason.LENGTH),
    **dict.fromkeys(_REFUSALS.split(), FinishReason.CONTENT_FILTER),
    "error": FinishReason.ERROR,
}
_BROKEN_OFF = {
    "error", "abort", "aborted", "cancelled", "network_error", "insufficient_system_resource",
    "malformed_function_call",
}  # fmt: skip
"""Finish reasons of answers that their server did not end."""
_WITHOUT_MESSAGE = (FinishReason.CONTENT_FILTER, FinishReason.LENGTH)


def parse_completion(
    payload: dict[str, Any], default_model: str, reasoning: str = "", service: str = ""
) -> LLMResponse:
    """Return a completion as the fleet's answer.

    `default_model` names the model when the payload does not; `reasoning` the field that its
    `service` wants back. Some servers split one answer into a choice with its text and others with
    its calls. Raises `ModelError` for an answer that its server broke off.
    """
    choices = choices_of(payload)
    if not choices:
        raise malformed("it has no choices")
    given = next((one["finish_reason"] for one in choices if one.get("finish_reason")), None)
    if word(given).lower() in _BROKEN_OFF:
        raise broken_off(word(given))
    message = _merged(choices)
    calls = _tool_calls(message)
    refusal = message.get("refusal")
    text = text_in(message.get("content")) or transcript_of(message)
    reason = finish_reason(given, asks_for_tools=bool(calls))
    is_open = bool(calls) or reason is FinishReason.LENGTH
    thought = leading_thought(text, is_open=is_open) if has_tags(service) else None
    if thought:
        text = text[thought.end() :]
    if not text and not calls and isinstance(refusal, str) and refusal:
        text, reason = refusal, FinishReason.CONTENT_FILTER
    model, by = payload.get("model"), model_at(service, default_model)
    return LLMResponse.model_construct(
        content=drop_leaked_arguments(text, calls) if text and calls else text,
        tool_calls=calls or None,
        usage=usage_of(payload.get("usage")),
        model=model if _is_name(model) else default_model,
        service_tier=tier_of(payload.get("service_tier")),
        finish_reason=reason,
        reasoning=(
            *(_sent_back(message, reasoning) if reasoning else ()),
            *kept_of(
                message,
                message.get("tool_calls"),
                by,
                apart=reasoning,
                before=thought[0] if thought else "",
            ),
        ),
        reasoning_text=shown_reasoning(
            [*_reasoning(message), *(thought.groups() if thought else ())]
        ),
        raw=payload,
        unread=_unread(message),
    )


def finish_reason(reason: Any, *, asks_for_tools: bool) -> FinishReason:
    """Return the reason in the fleet's words; `stop` with calls is corrected."""
    known = _REASONS.get(reason.lower(), FinishReason.OTHER) if isinstance(reason, str) else None
    if asks_for_tools and known in (None, FinishReason.STOP):
        return FinishReason.TOOL_CALLS
    return known or FinishReason.OTHER


_PROMPT, _COMPLETION = "prompt_tokens_details", "completion_tokens_details"
_CACHED = (
    *((_PROMPT, "cached_tokens"), ("prompt_cache_hit_tokens",), ("cache_read_input_tokens",)),
    *(("cached_tokens",), ("num_cached_tokens",), ("input_tokens_details", "cached_tokens")),
)
"""OpenAI; DeepSeek; LiteLLM; Moonshot; Mistral; servers with the words of Responses."""
_WRITTEN = (
    *((_PROMPT, "cache_creation_tokens"), (_PROMPT, "cache_write_tokens")),
    ("cache_creation_input_tokens",),
)
"""LiteLLM; OpenRouter; LiteLLM's older versions."""


_PARTS = frozenset({_COMPLETION, *APART, *(place[0] for place in (*_CACHED, *_WRITTEN))})
"""The fields that have counts besides those of prompt and completion."""
_PROMPTS = ("prompt_tokens", "input_tokens")
_COMPLETIONS = ("completion_tokens", "output_tokens")
"""Those of this protocol, and of others in its place."""


def _either(usage: dict[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        if (given := usage.get(name)) is not None:
            return given
    return None


def usage_of(usage: Any) -> UsageStats | None:
    """Return the token counts of one call, or None when they are absent or no counts."""
    if not isinstance(usage, dict):
        return None
    prompt, completion = _either(usage, _PROMPTS), _either(usage, _COMPLETIONS)
    if (counts := completed_counts(prompt, completion, usage.get("total_tokens"))) is None:
        return None
    if _PARTS.isdisjoint(usage):
        return usage_within(*counts)
    counted = usage_within(
        *counts,
        cached=count_in(usage, *_CACHED),
        written=count_in(usage, *_WRITTEN),
        thought=count_in(usage, (_COMPLETION, "reasoning_tokens")),
        may_be_apart=any(count_in(usage, (name,)) for name in APART),
    )
    audio = count_in(usage, (_PROMPT, "audio_tokens")) + count_in(
        usage, (_COMPLETION, "audio_tokens")
    )
    return counted.model_copy(update={"audio_tokens": audio}) if audio else counted


def _reasoning(message: dict[str, Any]) -> list[str]:
    """Return the texts in which a model of a compatible server reasoned."""
    for field in REASONING_FIELDS:
        if isinstance(text := message.get(field), str) and text:
            return [text]
    if thoughts := thoughts_in(message.get("content")):
        return thoughts
    details = message.get(REASONING_DETAILS)
    items = [one for one in details if isinstance(one, dict)] if isinstance(details, list) else []
    found = (one.get("text") or one.get("summary") for one in items)
    return [text for text in found if isinstance(text, str)]


def _sent_back(message: dict[str, Any], field: str) -> tuple[Block, ...]:
    value = message.get(field)
    return (reasoning_block(field, 0, {field: value}),) if value or value == "" else ()


def _is_name(model: Any) -> TypeGuard[str]:
    return isinstance(model, str) and 0 < len(model) <= _LONGEST_NAME


def _merged(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message of an answer: of each field what the first choice that has it says."""
    if len(choices) == 1 and isinstance(message := choices[0].get("message"), dict):
        return message
    merged: dict[str, Any] | None = None
    for choice in reversed(choices):
        given = choice.get("message")
        message = given if isinstance(given, dict) else choice.get("delta")
        message = message if isinstance(message, dict) else text_message(choice) or None
        if isinstance(message, dict):
            said = {name: value for name, value in message.items() if value} if merged else message
            merged = {**(merged or {}), **said}
    if merged is not None:
        return merged
    if finish_reason(choices[0].get("finish_reason"), asks_for_tools=False) in _WITHOUT_MESSAGE:
        return {}
    raise malformed("the first choice has no message")


def _unread(message: dict[str, Any]) -> str:
    """Return what a message has besides text and calls."""
    return "an image" if images_in(message) else "audio" if message.get("audio") else ""


def _tool_calls(message: dict[str, Any]) -> tuple[ToolCall, ...]:
    raw = message.get("tool_calls")
    if not raw and (called := older_call(message)):
        raw = [{"function": called}]
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise malformed("tool_calls is not a list")
    return parse_tool_calls(raw, new_id=new_call_id)


_GOOGLE = ".googleapis.com"


def _body(request: ModelRequest, endpoint: Endpoint) -> bytes:
    return encode(request_body(request, official=endpoint.official))


CHAT_COMPLETIONS = Format(
    route=ROUTES[Api.CHAT],
    body=_body,
    parse=parse_body,
    stream=StreamedCompletion,
    usage=usage_of,
    response=parse_completion,
    failure=failure_in,
)


def chat_of(form: Format, name: str, reasoning: str) -> Format:
    """Return the format of the service `name`: it gets back what it has given with its answers.

    `reasoning` is the field of their reasoning that it wants; "" for none.
    """

    def body(request: ModelRequest, endpoint: Endpoint) -> bytes:
        is_gemini = endpoint.host.endswith(_GOOGLE) and "gemini" in request.model
        to = Dialect(name, reasoning, endpoint.service, is_gemini)
        return encode(request_body(request, official=endpoint.official, to=to))

    response = partial(parse_completion, reasoning=reasoning, service=name)
    stream = partial(StreamedCompletion, service=name)
    return replace(form, body=body, stream=stream, response=response)


AZURE_CHAT_COMPLETIONS = replace(CHAT_COMPLETIONS, route=ROUTES[Api.AZURE])
