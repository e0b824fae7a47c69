"""Which answers are kept, in which form, and what an answer from the cache says of itself. Pure."""

import json
from collections.abc import Callable

from pydantic import ValidationError

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.responses import LLMResponse, OutputFormat
from stepfleet.orchestrator.records.steps import FinishReason
from stepfleet.orchestrator.records.usage import CacheUse, UsageStats
from stepfleet.orchestrator.tools.schemas.handles import handle_of

Cost = Callable[[str, UsageStats], float]
"""Prices a call of a model, in USD."""

_WHOLE = (FinishReason.STOP, FinishReason.TOOL_CALLS)
_NO_CALL = UsageStats(cached_calls=1)


def is_keepable(response: LLMResponse, output: OutputFormat | None = None) -> bool:
    """Return whether an answer may be given again: a whole one, with something in it.

    Answers that were cut off, that a content filter has touched, whose tool calls cannot be read,
    or that are not the `output` which was asked for, are not: the next try may do better.
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
    """Return what is stored of an answer (JSON): all that the model said, and what it took."""
    return response.model_copy(update={"cache": None, "remembered": None}).to_json()


def answer_of(entry: str, key: str, model: str, cost: Cost) -> LLMResponse | None:
    """Return the answer that an entry holds, marked as a hit; None for what cannot be read.

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
        saved_usd=cost(stored.model or model, before) if before else 0.0,
    )
    return stored.model_copy(update={"usage": _NO_CALL, "cache": saved})


def marked(response: LLMResponse, key: str) -> LLMResponse:
    """Return the answer to a call that was made, with the key under which it may be kept."""
    return response.model_copy(update={"cache": CacheUse(key=key)})
