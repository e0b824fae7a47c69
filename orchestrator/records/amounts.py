"""What tokens and costs can be: numbers that models, prices and files report, within bounds. Pure.

A number beyond them is no measurement. Unbounded it would overflow counters that a batch sums up,
or could not be written at all, and the work that it belongs to would be done and paid for again.
"""

import math
from typing import Any

from stepfleet.orchestrator.records.usage import UsageStats

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
    """Return a reported number of tokens; None where it is no whole number within bounds."""
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
    """Return a cost of 0 to `MOST_USD`; what is no number, or below 0, is 0."""
    return min(usd, MOST_USD) if usd > 0 else 0.0


def nano_usd(usd: float) -> int:
    """Return a step's cost in billionths of a dollar, as the scripts count it."""
    return round(bounded_cost(usd) * NANO)


def is_plausible(usage: UsageStats, usd: float) -> bool:
    """Return whether sums of a run, read from a file, can be what calls have used."""
    counts = (getattr(usage, name) for name in _COUNTS)
    return all(0 <= count <= MOST_TOKENS_OF_RUN for count in counts) and (
        math.isfinite(usd) and 0 <= usd <= MOST_USD_OF_RUN
    )
