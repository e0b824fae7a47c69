"""Tokens that model calls used. Pure values."""

import math
import operator
from dataclasses import field
from typing import Any

from pydantic import Field

from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.values import value_class


class CacheUse(Record):
    """How a step's model call met the response cache.

    `key` names the request: SHA-256 (hex) of its canonical form. With `hit` the answer is a stored
    one: no call was made, so the step has no tokens and no cost; `saved_tokens` and `saved_usd`
    (USD) are what the call took that the answer is from, 0 where that is not known.
    """

    key: str
    hit: bool = False
    saved_tokens: int = 0
    saved_usd: float = 0.0


class FailedCall(Record):
    """A model of the agent's list that did not answer. `code` is that of its error.

    With `ambiguous` the call may have been paid for: `tokens` and `cost_usd`, counted here where
    they are `estimated`; `usage` has the tokens by kind, `service_tier` the provider's tier.
    Without tokens its price is not known.
    """

    model: str
    code: str
    message: str
    ambiguous: bool = False
    tokens: int = 0
    cost_usd: float = 0.0
    estimated: bool = False
    usage: "UsageStats | None" = Field(default=None, exclude_if=operator.not_)
    service_tier: str = Field(default="", exclude_if=operator.not_)


class Fallback(Record):
    """The `model` of the agent's list that answered, after the calls that `failed`, in order."""

    model: str
    failed: tuple[FailedCall, ...] = ()

    def __str__(self) -> str:
        """Return both on one line."""
        why = "; ".join(f"{one.model} ({one.code}: {one.message})" for one in self.failed)
        return f"{self.model} answered in the place of {why}"


class UsageStats(Record):
    """Token counts of one call or of a sum of calls.

    `cached_tokens` (read from the provider's prompt cache) and `cache_write_tokens` (written to it)
    are parts of the prompt count, `cache_write_1h_tokens` (written for an hour) of the latter,
    `reasoning_tokens` of the completion count, and `audio_tokens` of prompt and completion; they
    are never added to the total again. `llm_calls` were made; `cached_calls` were
    answered from the response cache instead, and have no tokens.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    llm_calls: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    cached_calls: int = Field(default=0, exclude_if=operator.not_)
    cache_write_tokens: int = Field(default=0, exclude_if=operator.not_)
    cache_write_1h_tokens: int = Field(default=0, exclude_if=operator.not_)
    audio_tokens: int = Field(default=0, exclude_if=operator.not_)

    def __add__(self, other: "UsageStats") -> "UsageStats":
        """Return the sum, field by field."""
        more = other.__dict__
        return UsageStats.of_fields(
            {name: count + more[name] for name, count in self.__dict__.items()}
        )

    def __sub__(self, other: "UsageStats") -> "UsageStats":
        """Return the difference, field by field (what a removed step had added)."""
        less = other.__dict__
        return UsageStats.of_fields(
            {name: count - less[name] for name, count in self.__dict__.items()}
        )


class LostUse(Record):
    """What calls of attempts that were not committed have cost, or may have, in sums."""

    calls: int = 0
    tokens: int = 0
    cost_usd: float = 0.0

    def __add__(self, other: "LostUse") -> "LostUse":
        """Return the sum, field by field."""
        return LostUse.model_construct(
            calls=self.calls + other.calls,
            tokens=self.tokens + other.tokens,
            cost_usd=sum_usd(self.cost_usd, other.cost_usd),
        )

    def __sub__(self, other: "LostUse") -> "LostUse":
        """Return the difference, field by field."""
        return LostUse.model_construct(
            calls=self.calls - other.calls,
            tokens=self.tokens - other.tokens,
            cost_usd=sum_usd(self.cost_usd, -other.cost_usd),
        )


@value_class(frozen=True, slots=True)
class Spent:
    """The possible charge for a failed call: tokens and USD; without tokens it is not known.

    With `estimated` they are counted here; otherwise the provider has reported them. `usage` has
    the tokens by kind, `model` is the one that was called, `service_tier` the provider's tier.
    """

    tokens: int
    cost_usd: float
    estimated: bool = True
    usage: UsageStats | None = field(default=None, compare=False)
    model: str | None = field(default=None, compare=False)
    service_tier: str = field(default="", compare=False)


MOST_TOKENS = 1_000_000_000
"""Tokens of one call, of each kind."""
MOST_USD = 1_000_000.0
"""Cost of one step."""
MOST_TOKENS_OF_RUN = 1_000_000 * MOST_TOKENS
MOST_USD_OF_RUN = 1_000.0 * MOST_USD
"""Sums of a run, as a file may state them."""
NANO = 1_000_000_000
_COUNTS = tuple(UsageStats.model_fields)


def token_count(value: Any) -> int | None:
    """Return a reported number of tokens; None if it is not an integer within bounds."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # JavaScript has no others
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TOKENS
    return value if is_count else None


def bounded_usage(usage: Any) -> UsageStats | None:
    """Return the usage, each count that is none within bounds as 0, or None for what is none.

    The same object where nothing is wrong with it.
    """
    if not isinstance(usage, UsageStats):
        return None
    given = {name: getattr(usage, name, 0) for name in _COUNTS}
    wrong = {name: 0 for name, value in given.items() if type(value) is not int}
    wrong |= {name: 0 for name, value in given.items() if token_count(value) is None}
    if "total_tokens" in wrong:
        parts = (given | wrong)["prompt_tokens"], (given | wrong)["completion_tokens"]
        wrong["total_tokens"] = sum(parts)
    return usage.model_copy(update=wrong) if wrong else usage


def bounded_cost(usd: float) -> float:
    """Return a cost of 0 to `MOST_USD` in billionths; 0 if it is not a number, or below 0."""
    return sum_usd(min(usd, MOST_USD)) if usd > 0 else 0.0


def sum_usd(*amounts: float) -> float:
    """Return the sum in billionths, the ledger's unit: the rest is an error of binary fractions."""
    return round(sum(amounts), 9)


def nano_usd(usd: float) -> int:
    """Return a step's cost in billionths of a dollar, as the scripts count it."""
    return round(min(usd, MOST_USD) * NANO) if usd > 0 else 0


def is_plausible(usage: UsageStats, usd: float) -> bool:
    """Return whether sums of a run, read from a file, can be what calls have used."""
    counts = (getattr(usage, name) for name in _COUNTS)
    return all(0 <= count <= MOST_TOKENS_OF_RUN for count in counts) and (
        math.isfinite(usd) and 0 <= usd <= MOST_USD_OF_RUN
    )
