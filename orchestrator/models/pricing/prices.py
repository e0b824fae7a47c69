"""A table of prices and the cost of a call by it. Pure but for a warning per unknown model.

Knows no sources of tables; `loading` does.
"""

import logging
import operator
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

from pydantic import Field, ValidationError

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.text.validation import explain_invalid
from stepfleet.orchestrator.records.usage import UsageStats

_STANDARD = frozenset({"", "standard", "default", "auto", "on_demand", "unspecified"})
"""Words for the tier that has the usual price."""
_BEFORE = ("service_tier_", "on_demand_")
"""What some of Google's answers put before the word: ON_DEMAND_FLEX."""
_LONGEST = 40
OTHER = "other"


def tier_of(*stated: Any) -> str:
    """Return the first tier but the standard one that an answer names; "" for none.

    The words are the providers', in lower case; anything but a word is `other`.
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


_LOG = logging.getLogger(__name__)
_PER = 1_000_000
_SECONDS_KEPT = 3600
_HOUR = 1.6
"""A cache write for an hour is twice the input's price, one for five minutes 1.25 times."""
_MOST_KEPT = 1024
_TIERS = "tiers"
_DATED = re.compile(r"[-@](?:20\d{6}|20\d\d-\d\d-\d\d|latest)$")
_PROVIDERS = {"openai-responses": "openai"}
_BOUNDARIES = "-@:/"
MAKERS = re.compile(r"^(?:[a-z-]{1,40}[.:]){1,4}")
DEFAULT = "default"


Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Rates(Record):
    """USD per million tokens.

    `cached_input` holds for prompt tokens read from the provider's prompt cache, `cache_write` for
    those written to it; without them such tokens cost as much as other prompt tokens. What is
    written for an hour costs 1.6 times `cache_write`.
    """

    input: Amount
    output: Amount
    cached_input: Amount | None = None
    cache_write: Amount | None = None

    def of(self, usage: UsageStats) -> float:
        """Return the cost of `usage` in USD."""
        cached = min(usage.cached_tokens, usage.prompt_tokens)
        written: float = min(usage.cache_write_tokens, usage.prompt_tokens - cached)
        cached_price = self.input if self.cached_input is None else self.cached_input
        write_price = self.input if self.cache_write is None else self.cache_write
        prompt = (usage.prompt_tokens - cached - written) * self.input
        if self.cache_write is not None and usage.cache_write_1h_tokens:
            written += (_HOUR - 1) * min(usage.cache_write_1h_tokens, written)
        prompt += cached * cached_price + written * write_price
        return (prompt + usage.completion_tokens * self.output) / _PER


class LongPrompt(Rates):
    """What all tokens of a call cost whose prompt has more than `above` tokens."""

    above: int = Field(gt=0)


class Price(Rates):
    """The price of a model. `tiers` has those of the provider's other tiers.

    A tier (`flex`, `priority`, `batch`) has a multiplier, or a price of its own.
    """

    long_prompt: LongPrompt | None = Field(default=None, exclude_if=operator.not_)
    tiers: dict[str, "Amount | Price"] = Field(default_factory=dict, exclude_if=operator.not_)

    def cost(self, usage: UsageStats, tier: str = "") -> float:
        """Return the cost of `usage` in USD; a tier that it does not have costs as the usual one.

        `tier` is the one that the answer names, "" for the usual one (see `tiers.tier_of`).
        """
        of_tier = self.tiers.get(tier) if tier else None
        if isinstance(of_tier, Price):
            return of_tier.cost(usage)
        is_long = self.long_prompt is not None and usage.prompt_tokens > self.long_prompt.above
        rates = self.long_prompt if self.long_prompt is not None and is_long else self
        return rates.of(usage) * (1.0 if of_tier is None else of_tier)


FALLBACK = Price(input=5.0, output=15.0)
"""The price of a model that no table has, where there is no default either."""


class Cost(Protocol):
    """Prices calls, as `Prices.cost_of`."""

    def __call__(
        self, model: str, usage: UsageStats, tier: str = "", address: str = "", /
    ) -> float:
        """Return the cost in USD."""
        ...


@dataclass(frozen=True)
class Prices:
    """Prices by model id. A model's dated variants share the price of the longest known prefix.

    `known` returns the seller and the price of a model that `models` do not have at its provider;
    it may have to load them. `tiers` are the multipliers of a seller's tiers. A model without a
    price costs the `default`; without one, as much as `base` says, which also has the tiers that
    are missing here.
    """

    models: Mapping[str, Price] = field(default_factory=dict)
    default: Price | None = None
    source: str = "built in"
    tiers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    known: Callable[[str, str], tuple[str, Price] | None] | None = field(default=None, repr=False)
    base: "Prices | None" = field(default=None, repr=False)
    _found: dict[tuple[str, str, int], tuple[Price, bool]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _warned: set[str] = field(default_factory=set, repr=False, compare=False)

    def price_of(self, model: str, address: str = "") -> Price:
        """Return the price of `model`, an id with or without its provider (`openai:...`).

        `address` is where it is bought, if that is known: a URL or a provider's name. A model that
        no entry fits costs the default, with one warning per model and table.
        """
        return self._search(model, address)[0]

    def has(self, model: str, address: str = "") -> bool:
        """Return whether an entry fits `model`; else it costs the default."""
        return self._search(model, address)[1]

    def cost_of(self, model: str, usage: UsageStats, tier: str = "", address: str = "") -> float:
        """Return the cost of `usage` of `model` in USD, in the tier that the answer names.

        A tier without a price costs as the usual one, with one warning per model and tier.
        """
        price, is_known = self._search(model, address)
        cost = price.cost(usage, tier)
        if not tier or not is_known or tier in price.tiers:
            return cost
        base = self.base.price_of(model, address) if self.base else price
        if tier not in base.tiers:
            self._warn_of_tier(model, tier)
            return cost
        usual = base.cost(usage)
        return cost * base.cost(usage, tier) / usual if usual else cost

    def warm(self) -> None:
        """Load what the first search would have to."""
        if self.known is not None:
            self.known("", "")
        elif self.default is None and self.base is not None:
            self.base.warm()

    def _search(self, model: str, address: str) -> tuple[Price, bool]:
        key = (model, address, int(time.monotonic() // _SECONDS_KEPT))
        found = self._found.get(key)
        if found is None:
            if len(self._found) >= _MOST_KEPT:  # names of models are foreign input
                self._found.clear()
            found = self._found[key] = self._find(model, address)
        return found

    def knows(self, model: str, address: str) -> bool:
        """Return whether a price is found without a search in what `known` has to load."""
        if self.known is not None:
            return self._at_home(model, address) is not None
        if self.default is not None or self.base is None:
            return True
        return fitting_key(model, self.models) is not None or self.base.knows(model, address)

    def _at_home(self, model: str, address: str) -> Price | None:
        """Return the price of a model, or of a dated version, where its own provider sells it."""
        name = model.rpartition(":")[2]
        provider = _PROVIDERS.get(address, address)
        for known in (name, _DATED.sub("", name)):
            if (price := self.models.get(f"{provider}:{known}")) is not None:
                return price
        return None

    def _find(self, model: str, address: str) -> tuple[Price, bool]:
        if self.known is not None and (price := self._at_home(model, address)):
            return price, True
        if self.known is not None and (sold := self.known(model, address)):
            seller, price = sold
            tiers = {**self.tiers.get(seller, {}), **price.tiers}
            return price.model_copy(update={"tiers": tiers}), True
        if (key := fitting_key(model, self.models)) is not None:
            return self.models[key], True
        if self.default is None and self.base is not None:
            return self.base._search(model, address)  # noqa: SLF001 - of the same class
        default = self.default or FALLBACK
        self._warn(
            model,
            f"no price for model {model[:200]!r} in {self.source}: using the default of "
            f"{default.input} USD in and {default.output} USD out per million tokens; add the "
            "model to your model_pricing.json",
        )
        return default, False

    def _warn_of_tier(self, model: str, tier: str) -> None:
        self._warn(
            f"{tier} {model}",
            f"no price for tier {tier!r} of model {model[:200]!r} in {self.source}: using that of "
            f'its standard tier; add "tiers": {{"{tier}": MULTIPLIER}} to the model in your '
            "model_pricing.json",
        )

    def _warn(self, about: str, text: str) -> None:
        if about not in self._warned and len(self._warned) < _MOST_KEPT:
            self._warned.add(about)
            _LOG.warning("%s", text)


def fitting_key(model: str, known: Mapping[str, Any]) -> str | None:
    """Return the key that fits `model`, an id with or without its provider; None where none does.

    The whole id is looked for first, without its maker's name last (`us.anthropic.claude-...`); of
    several keys that it begins with the longest one fits.
    """
    bare = MAKERS.sub("", model.rpartition("/")[2])
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

    `tiers` in a provider's group has the multipliers of all its models, in a model's entry its own.
    Models outside a provider's group are read too. A model is found by its id and by
    `provider:id`; of two groups that list the same id the first one names the bare id.
    Raises `ConfigurationError` that names the entry.
    """
    if not isinstance(data, dict):
        raise ConfigurationError(f"{source}: a pricing file is one JSON object")
    models: dict[str, Price] = {}
    tiers: dict[str, Mapping[str, float]] = {}
    for key, value in _entries(data):
        if not isinstance(value, dict):
            raise ConfigurationError(f"{source}: {key!r} must be an object, not {value!r:.40}")
        if _is_price(value):
            models[key] = _price(value, f"{source}: {key}")
            continue
        tiers[key] = shared = _multipliers(value.get(_TIERS, {}), f"{source}: {key}.{_TIERS}")
        for name, entry in _entries(value):
            if name == _TIERS:
                continue
            price = _price(entry, f"{source}: {key}.{name}")
            if shared:
                price = price.model_copy(update={"tiers": {**shared, **price.tiers}})
            models.setdefault(name, price)
            models[f"{key}:{name}"] = price
    default = models.pop(DEFAULT, None)
    return Prices(models=models, default=default, source=source, tiers=tiers)


def _entries(group: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in group.items() if not key.startswith("_")]


def _is_price(value: dict[str, Any]) -> bool:
    return any(isinstance(value.get(side), int | float) for side in ("input", "output"))


class _Multipliers(Record):
    tiers: dict[str, Amount]


def _multipliers(given: Any, where: str) -> dict[str, float]:
    try:
        return _Multipliers.model_validate({"tiers": given}, strict=True).tiers
    except ValidationError as error:
        raise ConfigurationError(f"{where}: {explain_invalid(error)} (a multiplier)") from None


def _price(entry: Any, where: str) -> Price:
    fields = entry if isinstance(entry, dict) else {}
    known = {name: fields[name] for name in Price.model_fields if name in fields}
    try:
        return Price.model_validate(known, strict=True)
    except ValidationError as error:
        raise ConfigurationError(f"{where}: {explain_invalid(error)} (USD per million)") from None
