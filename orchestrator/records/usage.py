"""Tokens that model calls used. Pure values."""

import operator
from dataclasses import dataclass

from pydantic import Field

from stepfleet.orchestrator.records.base import Record


class UsageStats(Record):
    """Token counts of one call or of a sum of calls.

    `cached_tokens` and `reasoning_tokens` are parts of the prompt and completion counts that
    some providers report; they are never added to the total again. `llm_calls` were made;
    `cached_calls` were answered from the response cache instead, and have no tokens.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    llm_calls: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    cached_calls: int = Field(default=0, exclude_if=operator.not_)

    def __add__(self, other: "UsageStats") -> "UsageStats":
        """Return the sum, field by field."""
        return UsageStats.model_construct(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            total_tokens=self.total_tokens + other.total_tokens,
            llm_calls=self.llm_calls + other.llm_calls,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            reasoning_tokens=self.reasoning_tokens + other.reasoning_tokens,
            cached_calls=self.cached_calls + other.cached_calls,
        )

    def __sub__(self, other: "UsageStats") -> "UsageStats":
        """Return the difference, field by field (what a removed step had added)."""
        return UsageStats(
            prompt_tokens=self.prompt_tokens - other.prompt_tokens,
            completion_tokens=self.completion_tokens - other.completion_tokens,
            total_tokens=self.total_tokens - other.total_tokens,
            llm_calls=self.llm_calls - other.llm_calls,
            cached_tokens=self.cached_tokens - other.cached_tokens,
            reasoning_tokens=self.reasoning_tokens - other.reasoning_tokens,
            cached_calls=self.cached_calls - other.cached_calls,
        )


@dataclass(frozen=True, slots=True)
class Spent:
    """What a call that failed may be charged for: tokens, USD, and whether they are counted here.

    Where `estimated` is false, the provider has said them.
    """

    tokens: int
    cost_usd: float
    estimated: bool = True
