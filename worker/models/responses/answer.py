"""Reads answers of Responses, whole or streamed, into `LLMResponse`s. Pure."""

from typing import Any

from stepfleet.orchestrator.models.failures import stated_failure
from stepfleet.orchestrator.models.pricing.tiers import tier_of
from stepfleet.orchestrator.records.calls.tools import ToolCall
from stepfleet.orchestrator.records.conversation.messages import Block
from stepfleet.orchestrator.records.responses import LLMResponse
from stepfleet.orchestrator.records.steps import FinishReason
from stepfleet.orchestrator.records.usage import UsageStats
from stepfleet.orchestrator.tools import parse_tool_calls
from stepfleet.worker.attempt.sanitize import new_call_id
from stepfleet.worker.models.bodies import (
    DONE,
    MOST_REASONING,
    broken_off,
    completed_counts,
    count_in,
    malformed,
    parse_event,
    reasoning_block,
    shown_reasoning,
    usage_within,
    word,
)
from stepfleet.worker.models.responses.request import PROVIDER, SERVICE, said_in
from stepfleet.worker.models.responses.streamed_items import COMMENTARY, FINAL, StreamedItems
from stepfleet.worker.models.sent_back import PHASE, kept_of, model_at

_UNREAD = {
    "image_generation_call": "an image",
    **dict.fromkeys(("output_audio", "audio"), "audio"),
    **{
        kind: f"an item of type {kind!r}"
        for kind in (
            *("custom_tool_call", "mcp_approval_request", "computer_call"),
            *("local_shell_call", "shell_call", "apply_patch_call"),
        )
    },
}
"""Items that a model ends its turn with, and that are neither text nor calls of our tools."""
_ENDS = {f"response.{end}" for end in ("completed", "incomplete", "failed", "done")}
_COMPLETED = ("completed", "complete")
_NOT_ENDED = {"queued", "in_progress", "failed", "cancelled"}
_ASIDE = "aside"
_INPUT = "input_tokens_details"
_CUT = (
    "the answer was cut before this call was finished (its token limit, usually); the call was not "
    "executed: make it again, shorter"
)


def parse_response(payload: dict[str, Any], default_model: str) -> LLMResponse:
    """Return an answer as the fleet's; `default_model` names the model where it does not."""
    if word(payload.get("status")) in _NOT_ENDED:
        raise broken_off(payload["status"])
    output = payload.get("output")
    if not isinstance(output, list) or not all(isinstance(item, dict) for item in output):
        raise malformed("its output is not a list of items")
    texts: list[str] = []
    refusals: list[str] = []
    calls: list[dict[str, Any]] = []
    reasoning: list[Block] = []
    thoughts: list[str] = []
    says = False
    has_final = any(_phase(item) == FINAL for item in output)
    for item in output:
        kind = _ASIDE if _is_aside(item, has_final) else item.get("type")
        thoughts += _thoughts(item, kind)
        if (back := _back(item, kind)) and len(reasoning) < MOST_REASONING:
            reasoning.append(reasoning_block(PROVIDER, says + len(calls), back))
        if kind == "message":
            said = _said(item)
            says = says or any(said)
            texts += said
        elif kind == "function_call":
            calls.append({**item, "id": item.get("call_id")})
        refusals += _texts(item, "refusal", "refusal")
    found = _executable(parse_tool_calls(calls, new_id=new_call_id), calls, payload)
    phased = {PHASE: FINAL} if has_final else {}
    ids = [{"id": one["id"]} for one in calls]  # LiteLLM reads nothing else of a call
    reason = _reason(payload, has_calls=bool(found))
    if refusals and not texts and not found:
        texts, reason = refusals, FinishReason.CONTENT_FILTER
    model = payload.get("model")
    return LLMResponse.model_construct(
        content="".join(texts),
        tool_calls=found or None,
        usage=usage_of(payload.get("usage")),
        model=model if isinstance(model, str) and model else default_model,
        service_tier=tier_of(payload.get("service_tier")),
        finish_reason=reason,
        reasoning=(*reasoning, *kept_of(phased, ids, model_at(SERVICE, default_model))),
        reasoning_text=shown_reasoning(thoughts),
        raw=payload,
        unread=next(
            (_UNREAD[one] for item in output if (one := word(item.get("type"))) in _UNREAD), ""
        ),
    )


def _executable(
    found: tuple[ToolCall, ...], calls: list[dict[str, Any]], payload: dict[str, Any]
) -> tuple[ToolCall, ...]:
    """Return the calls; one that the model did not finish is answered, and not executed."""
    cut = {"incomplete"}
    if payload.get("status") == "incomplete":
        cut.add("in_progress")
    return tuple(
        ToolCall(id=one.id, name=one.name, error=one.error or _CUT)
        if word(call.get("status")) in cut
        else one
        for one, call in zip(found, calls, strict=False)  # the calls are bounded
    )


def _phase(item: dict[str, Any]) -> str:
    return word(item.get(PHASE)) if item.get("type") == "message" else ""


def _is_aside(item: dict[str, Any], has_final: bool) -> bool:
    """Return whether a message is what the model said on its way to the answer."""
    is_message, phase = item.get("type") == "message", _phase(item)
    return is_message and (phase == COMMENTARY or (has_final and phase != FINAL))


def _thoughts(item: dict[str, Any], kind: Any) -> list[str]:
    if kind == "reasoning":
        return _texts({"content": item.get("summary")}, "summary_text", "text")
    return _said(item) if kind == _ASIDE else []


def _back(item: dict[str, Any], kind: Any) -> dict[str, Any] | None:
    """Return what goes back of an item at its place in the answer."""
    if kind == "reasoning" and item.get("encrypted_content"):  # others are not known again
        return {name: value for name, value in item.items() if name != "status"}
    if kind == _ASIDE and (text := "".join(_said(item))):
        return said_in(_phase(item), text)
    return None


def _said(message: dict[str, Any]) -> list[str]:
    return _texts(message, "output_text", "text") or _texts(message, "text", "text")


def _texts(message: dict[str, Any], kind: str, field: str) -> list[str]:
    content = message.get("content")
    if isinstance(content, str):  # as in a request
        content = [{"type": "output_text", "text": content}]
    parts = content if isinstance(content, list) else []
    found = (one.get(field) for one in parts if isinstance(one, dict) and one.get("type") == kind)
    return [text for text in found if isinstance(text, str)]


def _reason(payload: dict[str, Any], *, has_calls: bool) -> FinishReason:
    if payload.get("status") == "incomplete":
        details = payload.get("incomplete_details")
        why = details.get("reason") if isinstance(details, dict) else None
        known = {
            "max_output_tokens": FinishReason.LENGTH,
            "content_filter": FinishReason.CONTENT_FILTER,
        }
        return known.get(word(why), FinishReason.OTHER)
    if has_calls:
        return FinishReason.TOOL_CALLS
    return FinishReason.STOP if payload.get("status") in _COMPLETED else FinishReason.OTHER


def usage_of(usage: Any) -> UsageStats | None:
    """Return the token counts of one call, or None when they are absent or no counts."""
    if not isinstance(usage, dict):
        return None
    names = ("input_tokens", "output_tokens", "total_tokens")
    if (counts := completed_counts(*map(usage.get, names))) is None:
        return None
    return usage_within(
        *counts,
        cached=count_in(usage, (_INPUT, "cached_tokens")),
        written=count_in(usage, (_INPUT, "cache_write_tokens")),
        thought=count_in(usage, ("output_tokens_details", "reasoning_tokens")),
    )


class StreamedResponse:
    """The answer so far. `error` is the payload of a failure that came as an event."""

    def __init__(self) -> None:
        self.error: dict[str, Any] | None = None
        self.usage: Any = None
        self._items = StreamedItems()
        self._response: dict[str, Any] | None = None
        self._is_done = False
        self._begun: dict[str, Any] = {}

    @property
    def size(self) -> int:
        """How many characters of text and calls it has."""
        return self._items.size

    @property
    def is_over(self) -> bool:
        """Whether nothing of interest follows."""
        return self._is_done or self._response is not None or self.error is not None

    @property
    def finished(self) -> bool:
        """Whether its own finish reason has come: then it is whole, whatever else may follow."""
        return self._response is not None or (self._is_done and self._items.are_whole)

    def add(self, data: bytes) -> str:
        """Add one event and return the piece of text in it. Raises `ModelError` if malformed."""
        if data == DONE:  # chat's word for the end
            self._is_done = True
            return ""
        event = parse_event(data)
        kind = word(event.get("type"))
        if kind in _ENDS:
            self._end(event.get("response"))
        elif kind == "error":
            self.error = event if event.get("error") else {"error": event}
        elif not kind or event.get("error"):
            self.error = stated_failure(event, "type")
        else:
            begun = event.get("response")
            self._begun = begun if isinstance(begun, dict) else self._begun
            return self._items.add(kind, event)
        return ""

    def payload(self) -> dict[str, Any]:
        """Return the whole answer. Raises `ModelError` when the stream broke off."""
        if not self.finished:
            raise malformed("the stream broke off")
        response = self._response or {**self._begun, "status": "completed"}
        return {**response, "output": self._items.output(response.get("output"))}

    def _end(self, response: Any) -> None:
        if not isinstance(response, dict):
            raise malformed("the stream's last event has no response")
        self.usage = response.get("usage")
        self._response = response
