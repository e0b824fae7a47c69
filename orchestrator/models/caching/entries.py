"""Entries of the response cache: the key of a request, and the answer that is kept. Pure.

A key is the hash of the request's canonical form. The form holds the question and its provider,
and no credentials: no key, no header, no organization. How an answer is delivered (streaming,
timeout) is no part of the question either.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest, OutputFormat
from stepfleet.orchestrator.records.steps import FinishReason
from stepfleet.orchestrator.records.usage import CacheUse, UsageStats
from stepfleet.orchestrator.tools.schemas.handles import handle_of

FORM = 1
"""Number of the form: entries of another one are never found."""

_DELIVERY = {"base_url", "api_key_env", "organization", "timeout", "stream"}
_LEFT_OUT: Mapping[str, Any] = {
    "settings": _DELIVERY,
    "messages": {"__all__": {"metadata": True, "tool_calls": {"__all__": {"error"}}}},
}

Cost = Callable[[str, UsageStats, str], float]
"""Prices a call of a model, in USD."""

_WHOLE = (FinishReason.STOP, FinishReason.TOOL_CALLS)
_NO_CALL = UsageStats(cached_calls=1)


def canonical(request: ModelRequest, provider: str) -> str:
    """Return the request's canonical form (JSON, keys sorted); `provider` answers it.

    Raises `ValueError`, `TypeError` or `RecursionError` for data that JSON does not have.
    """
    question = request.model_dump(mode="json", exclude=dict(_LEFT_OUT), warnings=False)
    form = {"form": FORM, "provider": provider, "request": question}
    return json.dumps(form, sort_keys=True, separators=(",", ":"))


def key_of(request: ModelRequest, provider: str) -> str:
    """Return the key of a request: SHA-256 (hex) of its canonical form. Raises as `canonical`."""
    return hashlib.sha256(canonical(request, provider).encode()).hexdigest()


def is_keepable(response: LLMResponse, output: OutputFormat | None = None) -> bool:
    """Return whether an answer may be given again: a whole one, with something in it.

    Answers that were cut off, that a content filter has touched, whose tool calls cannot be read,
    or that do not fit the requested `output`, are not kept: the next try may do better.
    """
    calls = response.tool_calls or ()
    if response.finish_reason not in _WHOLE or any(call.error for call in calls):
        return False
    if output is not None and not calls:
        return _fits(response.content, output)
    return bool(calls or response.content.strip())


def _fits(content: str, output: OutputFormat) -> bool:
    try:
        data = json.loads(content)
        schema = output.json_schema
        return schema is None or handle_of(schema).problems(data) is None
    except (ConfigurationError, ValueError, RecursionError):
        return False


def entry_of(response: LLMResponse) -> str:
    """Return the stored form of an answer (JSON): its content and its usage."""
    own = {"cache": None, "remembered": None, "request_id": ""}
    return response.model_copy(update=own).to_json()


def answer_of(entry: str, key: str, model: str, cost: Cost) -> LLMResponse | None:
    """Return the answer of an entry, marked as a hit; None for an unreadable entry.

    It has no tokens; `model` is priced where the entry does not name its own.
    """
    try:
        stored = LLMResponse.from_json(entry)
    except ValidationError:  # written by a newer version, or not by us
        return None
    before = stored.usage
    saved = CacheUse(
        key=key,
        hit=True,
        saved_tokens=before.total_tokens if before else 0,
        saved_usd=cost(stored.model or model, before, stored.service_tier) if before else 0.0,
    )
    return stored.model_copy(update={"usage": _NO_CALL, "cache": saved})


def marked(response: LLMResponse, key: str) -> LLMResponse:
    """Return the answer of a call, with the key under which it may be kept."""
    return response.model_copy(update={"cache": CacheUse(key=key)})
