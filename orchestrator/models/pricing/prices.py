"""A table of prices and the cost of a call by it. Pure but for a warning per unknown model.

Knows no sources of tables; `loading` does.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, ValidationError

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.text.validation import explain_invalid
from stepfleet.orchestrator.records.usage import UsageStats

_LOG = logging.getLogger(__name__)
_PER = 1_000_000
_BOUNDARIES = "-@:/"
_MAKERS = re.compile(r"^(?:[a-z-]{1,40}[.:]){1,4}")
DEFAULT = "default"


Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Price(Record):
    """USD per million tokens.

    `cached_input` holds for prompt tokens read from the provider's prompt cache, `cache_write` for
    those written to it; without them such tokens cost as much as other prompt tokens.
    """

    input: Amount
    output: Amount
    cached_input: Amount | None = None
    cache_write: Amount | None = None

    def cost(self, usage: UsageStats) -> float:
        """Return the cost of `usage` in USD."""
        cached = min(usage.cached_tokens, usage.prompt_tokens)
        written = min(usage.cache_write_tokens, usage.prompt_tokens - cached)
        cached_price = self.input if self.cached_input is None else self.cached_input
        write_price = self.input if self.cache_write is None else self.cache_write
        prompt = (usage.prompt_tokens - cached - written) * self.input
        prompt += cached * cached_price + written * write_price
        return (prompt + usage.completion_tokens * self.output) / _PER


FALLBACK = Price(input=5.0, output=15.0)
"""The price of a model that no table has, where there is no default either."""


@dataclass(frozen=True)
class Prices:
    """Prices by model id. A model's dated variants share the price of the longest known prefix."""

    models: Mapping[str, Price] = field(default_factory=dict)
    default: Price = FALLBACK
    source: str = "built in"
    _found: dict[str, Price] = field(default_factory=dict, repr=False, compare=False)

    def price_of(self, model: str) -> Price:
        """Return the price of `model`, an id with or without its provider (`openai:...`).

        A model that no entry fits costs the default, with one warning per model and table.
        """
        price = self._found.get(model)
        if price is None:
            price = self._found[model] = self._find(model)
        return price

    def has(self, model: str) -> bool:
        """Return whether an entry fits `model`; else it costs the default."""
        return self.price_of(model) is not self.default

    def cost_of(self, model: str, usage: UsageStats) -> float:
        """Return the cost of `usage` of `model` in USD."""
        return self.price_of(model).cost(usage)

    def _find(self, model: str) -> Price:
        if (key := fitting_key(model, self.models)) is not None:
            return self.models[key]
        _LOG.warning(
            "no price for model %r in %s: using the default of %s USD in and %s USD out per "
            "million tokens; add the model to your model_pricing.json",
            model,
            self.source,
            self.default.input,
            self.default.output,
        )
        return self.default


def fitting_key(model: str, known: Mapping[str, Any]) -> str | None:
    """Return the key that fits `model`, an id with or without its provider; None where none does.

    The whole id is looked for first, without its maker's name last (`us.anthropic.claude-...`); of
    several keys that it begins with the longest one fits.
    """
    bare = _MAKERS.sub("", model.rpartition("/")[2])
    for name in (model, model.partition(":")[2], model.partition("/")[2], bare):
        if name and (key := _longest_prefix(name, known)) is not None:
            return key
    return None


def _longest_prefix(name: str, known: Mapping[str, Any]) -> str | None:
    """Return the longest key that `name` is or begins with; a key ends at a word's boundary."""
    if name in known:
        return name
    fitting = (
        key
        for key in known
        if name.startswith(key) and name[len(key) : len(key) + 1] in _BOUNDARIES
    )
    return max(fitting, key=len, default=None)


def parse_prices(data: Any, source: str) -> Prices:
    """Read a table: provider -> model -> {input, output}, plus `default`; `_` keys are notes.

    Models outside a provider's group are read too. A model is found by its id and by
    `provider:id`; of two groups that list the same id the first one names the bare id.
    Raises `ConfigurationError` that names the entry.
    """
    if not isinstance(data, dict):
        raise ConfigurationError(f"{source}: a pricing file is one JSON object")
    models: dict[str, Price] = {}
    for key, value in _entries(data):
        if not isinstance(value, dict):
            raise ConfigurationError(f"{source}: {key!r} must be an object, not {value!r:.40}")
        if _is_price(value):
            models[key] = _price(value, f"{source}: {key}")
            continue
        for name, entry in _entries(value):
            price = _price(entry, f"{source}: {key}.{name}")
            models.setdefault(name, price)
            models[f"{key}:{name}"] = price
    default = models.pop(DEFAULT, FALLBACK)
    return Prices(models=models, default=default, source=source)


def _entries(group: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in group.items() if not key.startswith("_")]


def _is_price(value: dict[str, Any]) -> bool:
    return any(isinstance(value.get(side), int | float) for side in ("input", "output"))


def _price(entry: Any, where: str) -> Price:
    fields = entry if isinstance(entry, dict) else {}
    known = {name: fields[name] for name in Price.model_fields if name in fields}
    try:
        return Price.model_validate(known, strict=True)
    except ValidationError as error:
        raise ConfigurationError(f"{where}: {explain_invalid(error)} (USD per million)") from None
