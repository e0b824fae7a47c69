"""Decisions of the response cache: the agents that take part, equal requests, answers to keep.

Pure: knows no store and makes no call. A key is the hash of the request's canonical form. The form
holds the question and its provider, and no credentials: no key, no header, no organization. How an
answer is delivered (streaming, timeout) does not belong to the question either.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import Field, ValidationError

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest, OutputFormat
from stepfleet.orchestrator.records.steps import FinishReason
from stepfleet.orchestrator.records.usage import CacheUse, UsageStats
from stepfleet.orchestrator.tools.schemas.handles import handle_of

LONGEST_SECONDS = 366 * 24 * 3600


class CachePolicy(Record):
    """An agent with such a policy shares its model's answers among all runs with equal requests.

    An entry lives for `ttl` seconds. Answers above `max_entry_bytes` (JSON) are not kept. With
    `models` only calls of these models (`provider:name`) take part; without, whichever model the
    run has. With `refresh` no entry is read: the call is made, and its answer replaces the entry.
    """

    ttl: int = Field(default=86_400, ge=1, le=LONGEST_SECONDS)
    max_entry_bytes: int = Field(default=262_144, ge=1)
    models: tuple[str, ...] = ()
    refresh: bool = False

    def covers(self, model: str) -> bool:
        """Return whether calls of that model take part."""
        return not self.models or model in self.models


FIELDS = ("entries", "bytes", "hits", "misses")


class ModelCacheStatistics(Record):
    """The entries of one model and their size in bytes; reads that found one, or none."""

    entries: int = 0
    bytes: int = 0
    hits: int = 0
    misses: int = 0


class CacheStatistics(Record):
    """The fleet's response cache. `max_bytes` bounds its entries together.

    Reads are counted as they happen: a step that is repeated after a crash reads again. The steps'
    own counts are in their records, `usage.cached_calls` of runs.
    """

    entries: int = 0
    bytes: int = 0
    max_bytes: int = 0
    hits: int = 0
    misses: int = 0
    by_model: dict[str, ModelCacheStatistics] = Field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """The share of reads that found an entry, 0 to 1."""
        reads = self.hits + self.misses
        return self.hits / reads if reads else 0.0


def statistics_of(counts: Iterable[Mapping[str, str]], max_bytes: int) -> CacheStatistics:
    """Return the sums over the counters of all parts of the cache (`field:model` to number)."""
    by_model: dict[str, dict[str, int]] = {}
    for part in counts:
        for name, value in part.items():
            field, _, model = name.partition(":")
            if field in FIELDS:
                sums = by_model.setdefault(model, dict.fromkeys(FIELDS, 0))
                sums[field] += int(value)
    models = {
        model: ModelCacheStatistics(**sums)
        for model, sums in sorted(by_model.items())
        if any(sums.values())
    }
    sums = {field: sum(getattr(one, field) for one in models.values()) for field in FIELDS}
    return CacheStatistics(max_bytes=max_bytes, by_model=models, **sums)


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
