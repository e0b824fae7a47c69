"""Reads answers of Gemini, whole or streamed, into `LLMResponse`s. Pure."""

from typing import Any

from stepfleet.orchestrator.models.failures import stated_failure
from stepfleet.orchestrator.models.pricing.tiers import tier_of
from stepfleet.orchestrator.records.conversation.messages import Block
from stepfleet.orchestrator.records.responses import LLMResponse
from stepfleet.orchestrator.records.steps import FinishReason
from stepfleet.orchestrator.records.usage import UsageStats, token_count
from stepfleet.orchestrator.tools import parse_tool_calls
from stepfleet.orchestrator.tools.calls import MOST_CALLS
from stepfleet.worker.attempt.sanitize import new_call_id
from stepfleet.worker.models.bodies import (
    DONE,
    MOST_BLOCKS,
    MOST_REASONING,
    blocked,
    malformed,
    media_of_type,
    merged_usage,
    parse_event,
    reasoning_block,
    shown_reasoning,
    word,
)
from stepfleet.worker.models.google.request import PROVIDER

_SIGNATURE = "thoughtSignature"
_SAID = "finishMessage"
_LONGEST_MESSAGE = 500
_REFUSALS = (
    "SAFETY RECITATION BLOCKLIST PROHIBITED_CONTENT SPII MODEL_ARMOR LANGUAGE IMAGE_SAFETY"
    " IMAGE_PROHIBITED_CONTENT IMAGE_RECITATION"
)
_REASONS = {
    "STOP": FinishReason.STOP,
    "MAX_TOKENS": FinishReason.LENGTH,
    **dict.fromkeys(_REFUSALS.split(), FinishReason.CONTENT_FILTER),
}
_MISTAKES = {
    "MALFORMED_FUNCTION_CALL",
    "UNEXPECTED_TOOL_CALL",
    "MALFORMED_RESPONSE",
    "MISSING_THOUGHT_SIGNATURE",
    "TOO_MANY_TOOL_CALLS",
}
"""Finish reasons of answers that the service could not read itself."""


def parse_content(payload: dict[str, Any], default_model: str) -> LLMResponse:
    """Return an answer as the fleet's; `default_model` names the model where it does not."""
    candidate = _candidate(payload)
    reason = word(candidate.get("finishReason"))
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    reasoning: list[Block] = []
    says = False
    for part in _parts(candidate):
        signature, call, text = part.get(_SIGNATURE), part.get("functionCall"), part.get("text")
        if isinstance(signature, str) and signature and len(reasoning) < MOST_REASONING:
            # It goes back with its part: all texts are the first one, and an empty one is its own.
            has_text = says or bool(text)
            at = 0 if has_text and not isinstance(call, dict) else says + len(calls)
            reasoning.append(reasoning_block(PROVIDER, at, {_SIGNATURE: signature}))
        if isinstance(call, dict):
            calls.append({**call, "arguments": call.get("args")})
        elif isinstance(text, str):
            (thoughts if part.get("thought") else texts).append(text)
            says = says or bool(text and not part.get("thought"))
    if not calls and reason in _MISTAKES:
        raise malformed(f"it ended with {reason}{_said(candidate)}")
    known = _REASONS.get(reason, FinishReason.OTHER)
    found = parse_tool_calls(calls, new_id=new_call_id)
    if found and (known is FinishReason.STOP or not reason):
        known = FinishReason.TOOL_CALLS
    if known is FinishReason.CONTENT_FILTER and not says:
        raise blocked(f"finishReason {reason}", word(candidate.get(_SAID)))
    model, usage = payload.get("modelVersion"), payload.get("usageMetadata")
    counted = usage if isinstance(usage, dict) else {}
    return LLMResponse.model_construct(
        content="".join(texts),
        tool_calls=found or None,
        usage=usage_of(usage),
        model=model if isinstance(model, str) and model else default_model,
        service_tier=tier_of(counted.get("serviceTier"), counted.get("trafficType")),
        finish_reason=known,
        reasoning=tuple(reasoning),
        reasoning_text=shown_reasoning(thoughts),
        raw=payload,
        unread=next(filter(None, map(_unread, _parts(candidate))), ""),
    )


def _unread(part: dict[str, Any]) -> str:
    """Return what a part has that is neither text nor a call; images of thoughts are drafts."""
    found = (part.get(field) for field in ("inlineData", "fileData"))
    data = next((one for one in found if isinstance(one, dict)), None)
    return "" if data is None or part.get("thought") else media_of_type(data.get("mimeType"))


def _said(candidate: dict[str, Any]) -> str:
    message = word(candidate.get(_SAID))
    return f": {message[:_LONGEST_MESSAGE]}" if message else ""


def _candidate(payload: dict[str, Any]) -> dict[str, Any]:
    candidates = payload.get("candidates")
    if isinstance(candidates, list) and candidates and isinstance(candidates[0], dict):
        return candidates[0]
    feedback = payload.get("promptFeedback")
    if isinstance(feedback, dict) and feedback.get("blockReason"):
        # The prompt itself was refused.
        reason = f"blockReason {word(feedback['blockReason'])}"
        raise blocked(reason, word(feedback.get("blockReasonMessage")))
    raise malformed("it has no candidates")


def _parts(candidate: dict[str, Any]) -> list[dict[str, Any]]:
    content = candidate.get("content") or {}
    parts = content.get("parts") or [] if isinstance(content, dict) else None
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise malformed("the first candidate's content has no list of parts")
    return parts


def usage_of(usage: Any) -> UsageStats | None:
    """Return the token counts of one call, or None when they are absent or no counts."""
    if not isinstance(usage, dict):
        return None
    prompt = token_count(usage.get("promptTokenCount"))
    if prompt is None:
        return None
    prompt += token_count(usage.get("toolUsePromptTokenCount")) or 0
    thought = token_count(usage.get("thoughtsTokenCount")) or 0
    said = token_count(usage.get("candidatesTokenCount"))
    if said is None:  # an answer without text has none; proxies may leave out those of others
        total = token_count(usage.get("totalTokenCount"))
        if total is None:
            return None
        said = max(total - prompt - thought, 0)
    completion = said + thought
    return UsageStats.model_construct(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        llm_calls=1,
        cached_tokens=token_count(usage.get("cachedContentTokenCount")) or 0,
        reasoning_tokens=thought,
        audio_tokens=_audio(usage.get("promptTokensDetails"))
        + _audio(usage.get("candidatesTokensDetails")),
    )


def _audio(details: Any) -> int:
    counts = [one for one in details if isinstance(one, dict)] if isinstance(details, list) else []
    return sum(
        token_count(one.get("tokenCount")) or 0 for one in counts if one.get("modality") == "AUDIO"
    )


_HEAD = ("modelVersion", "promptFeedback", "responseId")
_PIECES = {"candidates", "usageMetadata", *_HEAD}
"""What an event that is no failure has one of."""


class StreamedContent:
    """The answer so far. `error` is the payload of a failure that came as an event."""

    def __init__(self) -> None:
        self.error: dict[str, Any] | None = None
        self.usage: Any = None
        self._size = 0
        self._calls = 0
        self._head: dict[str, Any] = {}
        self._has_begun = False
        self._is_closed = False
        self._candidate: dict[str, Any] = {}
        self._parts: list[dict[str, Any]] = []

    @property
    def size(self) -> int:
        """How many characters of text and calls it has."""
        return self._size

    @property
    def is_over(self) -> bool:
        """Whether nothing of interest follows: usage may come behind the finish reason."""
        return self._is_closed or self.error is not None

    @property
    def finished(self) -> bool:
        """Whether its own finish reason has come: then it is whole, whatever else may follow."""
        return bool(self._candidate)

    def add(self, data: bytes) -> str:
        """Add one event and return the piece of text in it. Raises `ModelError` if malformed."""
        if data == DONE:  # chat's word for the end
            self._is_closed = True
            return ""
        return self.take(parse_event(data), len(data))

    def take(self, event: dict[str, Any], size: int) -> str:
        """Add one event of `size` bytes and return the piece of text in it."""
        self.usage = merged_usage(self.usage, event.get("usageMetadata"))
        if event.get("error") or not event.keys() & _PIECES:
            self.error = stated_failure(event, "candidates")
            return ""
        self._head |= {name: event[name] for name in _HEAD if name in event}
        if not event.get("candidates"):
            return ""
        candidate = _candidate(event)
        self._has_begun = True
        if candidate.get("finishReason"):
            self._candidate = {name: candidate.get(name) for name in ("finishReason", _SAID)}
        before = self._calls
        text = "".join(map(self._add, _parts(candidate)))
        self._size += size if before < self._calls <= MOST_CALLS else 0
        return text

    def payload(self) -> dict[str, Any]:
        """Return the whole answer. Raises `ModelError` when the stream broke off."""
        if not self._candidate and "promptFeedback" not in self._head:
            no_end = "the stream broke off" if self._has_begun else "it has no candidates"
            raise malformed(no_end)
        whole = {**self._head, "usageMetadata": self.usage}
        if not self._candidate:
            return whole
        content = {"parts": self._parts}
        return {**whole, "candidates": [{**self._candidate, "content": content}]}

    def _add(self, part: dict[str, Any]) -> str:
        text = part.get("text")
        self._calls += isinstance(part.get("functionCall"), dict)
        if self._calls <= MOST_CALLS + 1 and len(self._parts) < MOST_BLOCKS:
            self._parts.append(part)
        if not isinstance(text, str):
            return ""
        self._size += len(text)
        return "" if part.get("thought") else text
