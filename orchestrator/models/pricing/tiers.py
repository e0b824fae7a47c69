"""The tier at which a provider says it has served a call: `flex`, `priority`, `batch`. Pure.

Knows no prices: those of a tier are in the pricing file.
"""

from typing import Any

_STANDARD = frozenset({"", "standard", "default", "auto", "on_demand", "unspecified"})
"""Words for the tier that has the usual price."""
_BEFORE = ("service_tier_", "on_demand_")
"""What some of Google's answers put before the word: ON_DEMAND_FLEX."""
_LONGEST = 40
OTHER = "other"


def tier_of(*stated: Any) -> str:
    """Return the first tier but the standard one that an answer names; "" for none.

    The words are the providers', in lower case; what is no word is `other`.
    """
    for one in stated:
        if not isinstance(one, str) or one in _STANDARD:
            continue
        word = one[: 2 * _LONGEST].strip().lower().replace("-", "_")
        for before in _BEFORE:
            word = word.removeprefix(before)
        if word not in _STANDARD:
            is_word = len(word) <= _LONGEST and word.isascii() and word.isidentifier()
            return word if is_word else OTHER
    return ""


def address_of(model: str, base_url: str | None) -> str:
    """Return where a model is bought: the address that the agent names, else its provider's name.

    `model` is the one that was asked for, `provider:name`.
    """
    return base_url or model.partition(":")[0]
