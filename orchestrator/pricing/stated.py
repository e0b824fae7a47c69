"""Prices that an agent states for its own model calls; they win over every table. Pure.

Decides which of them a call has. Knows no file and no worker: what an agent does not state, the
worker's prices say.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from stepfleet.orchestrator.pricing.prices import DEFAULT, Price, fitting_key
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.usage import UsageStats

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class StatedPrice(Record):
    """USD per million tokens; without `cached_input` cached tokens cost what others cost."""

    input: Amount
    output: Amount
    cached_input: Amount | None = None

    def cost(self, usage: UsageStats) -> float:
        """Return the cost of `usage` in USD."""
        return Price(self.input, self.output, self.cached_input).cost(usage)


def _by_model(given: Any) -> Any:
    """Read one price as that of all models: what stands at the top is the default."""
    if not isinstance(given, Mapping):
        return given
    models = {
        name: price
        for name, price in given.items()
        if name not in StatedPrice.model_fields or isinstance(price, Mapping | StatedPrice)
    }
    alone = {name: amount for name, amount in given.items() if name not in models}
    before = models.get(DEFAULT, {})
    earlier = before.to_dict() if isinstance(before, StatedPrice) else before
    return {**models, DEFAULT: {**earlier, **alone}} if alone else models


Pricing = Annotated[dict[str, StatedPrice], BeforeValidator(_by_model)]
"""Prices by model id, with or without the provider; `default` is for all others."""


def stated_cost(
    pricing: Mapping[str, StatedPrice], models: Iterable[str], usage: UsageStats
) -> float | None:
    """Return what `usage` costs in USD by the first of `models` that has a price; None without.

    `models` are the names that a call's model has: as the provider tells it, as it was asked for.
    """
    for model in models:
        if (key := fitting_key(model, pricing)) is not None:
            return pricing[key].cost(usage)
    default = pricing.get(DEFAULT)
    return None if default is None else default.cost(usage)
