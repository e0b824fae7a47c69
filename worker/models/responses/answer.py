"""Reads answers of Responses, whole or streamed, into `LLMResponse`s. Pure."""

from typing import Any

from stepfleet.orchestrator.records.conversation.messages import Block
from stepfleet.orchestrator.records.responses import LLMResponse
from stepfleet.orchestrator.records.steps import FinishReason
from stepfleet.orchestrator.records.usage import UsageStats, token_count
from stepfleet.orchestrator.tools import parse_tool_calls
from stepfleet.orchestrator.tools.calls import MOST_CALLS
from stepfleet.worker.attempt.sanitize import new_call_id
from stepfleet.worker.models.bodies import malformed, parse_event, reasoning_block, shown_reasoning
from stepfleet.worker.models.responses.request import PROVIDER, SERVICE
from stepfleet.worker.models.sent_back import kept_of, model_at

_ENDS = {"response.completed", "response.incomplete", "response.failed"}
_DELTAS = {"response.output_text.delta", "response.refusal.delta"}
_CALL_DELTA = "response.function_call_arguments.delta"
_MOST_ITEMS = 4 * MOST_CALLS


def parse_response(payload: dict[str, Any], default_model: str) -> LLMResponse:
    """Return an answer as the fleet's; `default_model` names the model where it does not."""
    output = payload.get("output")
    if not isinstance(output, list) or not all(isinstance(item, dict) for item in output):
        raise malformed("its output is not a list of items")
    texts: list[str] = []
    refusals: list[str] = []
    calls: list[dict[str, Any]] = []
    reasoning: list[Block] = []
    thoughts: list[str] = []
    for item in output:
        if item.get("type") == "reasoning":
            thoughts += _texts({"content": item.get("summary")}, "summary_text", "text")
        match item.get("type"):
            case "reasoning" if item.get("encrypted_content"):  # others are not known again
                at = any(texts) + len(calls)
                sent = {name: value for name, value in item.items() if name != "status"}
                reasoning.append(reasoning_block(PROVIDER, at, sent))
            case "message":
                texts += _texts(item, "output_text", "text")
                refusals += _texts(item, "refusal", "refusal")
            case "function_call":
                calls.append({**item, "id": item.get("call_id")})
    found = parse_tool_calls(calls, new_id=new_call_id)
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
        finish_reason=reason,
        reasoning=(*reasoning, *kept_of({}, ids, model_at(SERVICE, default_model))),
        reasoning_text=shown_reasoning(thoughts),
        raw=payload,
    )


def _texts(message: dict[str, Any], kind: str, field: str) -> list[str]:
    content = message.get("content")
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
        return known.get(str(why), FinishReason.OTHER)
    if has_calls:
        return FinishReason.TOOL_CALLS
    return FinishReason.STOP if payload.get("status") == "completed" else FinishReason.OTHER


def usage_of(usage: Any) -> UsageStats | None:
    """Return the token counts of one call, or None when they are absent or no counts."""
    if not isinstance(usage, dict):
        return None
    prompt, completion = (token_count(usage.get(f"{one}_tokens")) for one in ("input", "output"))
    if prompt is None or completion is None:
        return None
    return UsageStats.model_construct(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        llm_calls=1,
        cached_tokens=_detail(usage, "input_tokens_details", "cached_tokens"),
        cache_write_tokens=_detail(usage, "input_tokens_details", "cache_write_tokens"),
        reasoning_tokens=_detail(usage, "output_tokens_details", "reasoning_tokens"),
    )


def _detail(usage: dict[str, Any], group: str, name: str) -> int:
    details = usage.get(group)
    return (token_count(details.get(name)) if isinstance(details, dict) else None) or 0


class StreamedResponse:
    """The answer so far. `error` is the payload of a failure that came as an event."""

    def __init__(self) -> None:
        self.error: dict[str, Any] | None = None
        self.usage: Any = None
        self._size = 0
        self._items: dict[int, dict[str, Any]] = {}
        self._response: dict[str, Any] | None = None

    @property
    def size(self) -> int:
        """How many characters of text and calls it has."""
        return self._size

    @property
    def is_over(self) -> bool:
        """Whether nothing of interest follows."""
        return self._response is not None or self.error is not None

    def add(self, data: bytes) -> str:
        """Add one event and return the piece of text in it. Raises `ModelError` if malformed."""
        event = parse_event(data)
        kind = str(event.get("type"))
        if kind in _DELTAS or kind == _CALL_DELTA:
            piece = event.get("delta")
            self._size += len(piece) if isinstance(piece, str) else 0
            return piece if isinstance(piece, str) and kind == "response.output_text.delta" else ""
        if kind in _ENDS:
            self._end(event.get("response"))
        elif kind == "error" or event.get("error"):
            inner = event.get("error")
            self.error = event if isinstance(inner, dict) else {"error": event}
        elif kind == "response.output_item.done":
            self._keep(event.get("output_index"), event.get("item"))
        return ""

    def payload(self) -> dict[str, Any]:
        """Return the whole answer. Raises `ModelError` when the stream broke off."""
        if self._response is None:
            raise malformed("the stream broke off")
        items = [self._items[index] for index in sorted(self._items)]
        return {**self._response, "output": self._response.get("output") or items}

    def _end(self, response: Any) -> None:
        if not isinstance(response, dict):
            raise malformed("the stream's last event has no response")
        self.usage = response.get("usage")
        self._response = response

    def _keep(self, index: Any, item: Any) -> None:
        if isinstance(index, int) and isinstance(item, dict) and len(self._items) < _MOST_ITEMS:
            self._items[index] = item
