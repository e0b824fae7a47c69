"""Prices that an agent states for its own model calls; they win over every table. Pure.

Decides the price of a call. Knows no file and no worker: calls without a stated price have the
worker's.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

from stepfleet.orchestrator.models.pricing.prices import DEFAULT, Price, fitting_key
from stepfleet.orchestrator.records.usage import UsageStats

_TABLES = {"tiers", "long_prompt"}
"""Fields of a price that are tables themselves, as a model's entry is."""
_VERSION = re.compile(r"([-@:/](v?\d.*|latest|preview.*))?")


def _by_model(given: Any) -> Any:
    """Read a price without a model as the default of all models."""
    if not isinstance(given, Mapping):
        return given
    models = {
        name: price
        for name, price in given.items()
        if name not in Price.model_fields
        or (isinstance(price, Mapping | Price) and name not in _TABLES)
    }
    alone = {name: amount for name, amount in given.items() if name not in models}
    if not alone:
        return models
    before = models.get(DEFAULT, {})
    earlier = before.to_dict() if isinstance(before, Price) else before
    if not isinstance(earlier, Mapping):
        msg = "'default' must be a table of input and output in USD per million tokens"
        raise ValueError(msg)  # noqa: TRY004 - pydantic explains only these
    for name, amount in models.items():
        if not isinstance(amount, Mapping | Price):
            known = ", ".join(Price.model_fields)
            msg = f"{name!r} is neither a price's field ({known}) nor a model's table of them"
            raise ValueError(msg)  # noqa: TRY004 - as above
    return {**models, DEFAULT: {**earlier, **alone}}


Pricing = Annotated[dict[str, Price], BeforeValidator(_by_model)]
"""Prices by model id, with or without the provider; `default` is for all others."""


def stated_cost(
    pricing: Mapping[str, Price], models: Iterable[str], usage: UsageStats, tier: str = ""
) -> float | None:
    """Return the cost of `usage` in USD by the first of `models` with a price; None without.

    `models` are the names of a call's model: the provider's, and that of the request. `tier` is
    the one that the answer names; one without a price costs as the usual one.
    """
    for model in models:
        if (key := fitting_key(model, pricing)) is not None and _is_version(model, key):
            return pricing[key].cost(usage, tier)
    default = pricing.get(DEFAULT)
    return None if default is None else default.cost(usage, tier)


def _is_version(model: str, key: str) -> bool:
    """Return whether `model` is `key` or a version of it: gpt-4o-2024-08-06, not gpt-4o-mini."""
    return _VERSION.fullmatch(model.rpartition(key)[2]) is not None
