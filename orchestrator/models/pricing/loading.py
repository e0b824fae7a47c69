"""Finds and reads the pricing file. Falls back with a warning, and never raises for a bad file.

Order: the variables STEPFLEET_PRICING_CONFIG and SPARK_PRICING_CONFIG, ./model_pricing.json,
~/.stepfleet/model_pricing.json, ~/.spark/model_pricing.json, the shipped table with the library
`genai-prices` for models that it does not have, and at last one price for everything. What a file
does not name, and has no default for, is looked for after it.
"""

import functools
import json
import logging
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.models.pricing.prices import (
    DEFAULT,
    MAKERS,
    LongPrompt,
    Price,
    Prices,
    fitting_key,
    parse_prices,
    tier_of,
)
from stepfleet.orchestrator.records.usage import UsageStats

if TYPE_CHECKING:
    from genai_prices.data_snapshot import DataSnapshot
    from genai_prices.types import ModelInfo, ModelPrice, Provider

_LONGEST_NAME = 512
_ALIASES = {"bedrock": "aws", "openai-responses": "openai"}
_TIERS = {"service_tier", "processing", "speed"}
"""The library's words for what a tier is called in an answer."""
_FIELDS = {
    "input": "input_mtok",
    "output": "output_mtok",
    "cached_input": "cache_read_mtok",
    "cache_write": "cache_write_mtok",
}


def known_price(model: str, address: str) -> tuple[str, Price] | None:
    """Return the seller and the price of a model; None where the library does not know it.

    `address` is where it is bought: a URL or a provider's name. Prices change by the hour at most.
    """
    if len(model) > _LONGEST_NAME:
        return None
    return _known(model.lower(), address, int(time.monotonic() // 3600))


@lru_cache(maxsize=1024)
def _known(model: str, address: str, _hour: int) -> tuple[str, Price] | None:
    snapshot = _snapshot()
    if snapshot is None:
        return None
    now = datetime.now(UTC)
    for seller, name in _places(snapshot, model, address):
        found = seller.find_model(name, all_providers=snapshot.providers)
        price = _price(found, now, is_own=found in seller.models) if found else None
        if price is not None:
            return seller.id, price
    return None


@cache
def _snapshot() -> "DataSnapshot | None":
    try:
        from genai_prices.data_snapshot import get_snapshot  # noqa: PLC0415 - clients have none
    except ImportError:
        return None
    return get_snapshot()


def _places(snapshot: "DataSnapshot", model: str, address: str) -> Iterator[tuple["Provider", str]]:
    """Yield where to look, and for which name: first where it is bought, then at its maker's."""
    name = model.partition(":")[2]
    bare = MAKERS.sub("", model.rpartition("/")[2])
    maker = model.rpartition(":")[2].partition("/")[0] if "/" in model else ""
    sellers = (
        _at(snapshot, address),
        _named(snapshot, maker),
        next((one for one in snapshot.providers if _makes(one, bare)), None),
        _named(snapshot, "openrouter") if maker else None,
    )
    for seller in filter(None, sellers):
        yield from ((seller, one) for one in dict.fromkeys((model, name, bare)) if one)


def _at(snapshot: "DataSnapshot", address: str) -> "Provider | None":
    if "://" in address:
        return next((one for one in snapshot.providers if re.match(one.api_pattern, address)), None)
    return _named(snapshot, _ALIASES.get(address, address))


def _named(snapshot: "DataSnapshot", name: str) -> "Provider | None":
    # Not by the library's own search: it remembers all names that it was asked for.
    for one in snapshot.providers if name else ():
        if one.id == name or (one.provider_match and one.provider_match.is_match(name)):
            return one
    return None


def _makes(seller: "Provider", model: str) -> bool:
    return seller.model_match is not None and seller.model_match.is_match(model)


def _price(found: "ModelInfo", now: datetime, *, is_own: bool) -> Price | None:
    """Return an entry as the fleet's price; None if it is not by tokens of text."""
    standard = _rates(found.get_prices(now))
    if standard is None:
        return None
    tiers: dict[str, float | Price] = {}
    for variant in found.price_variants or () if is_own else ():
        words = [word for key, word in variant.when.items() if key in _TIERS]
        if len(words) == len(variant.when) == 1 and (tier := tier_of(words[0])):
            rates = _rates(found.get_prices(now, variant.when))
            if rates is not None and rates != standard:
                tiers[tier] = rates
    return standard.model_copy(update={"tiers": tiers}) if tiers else standard


def _rates(price: "ModelPrice") -> Price | None:
    given = {name: getattr(price, field) for name, field in _FIELDS.items()}
    if given["input"] is None or given["output"] is None:
        return None
    starts = [one.tiers[0].start for one in given.values() if hasattr(one, "tiers") and one.tiers]
    usual = {name: _amount(one, 0) for name, one in given.items()}
    if not starts:
        return Price(**usual)
    above = min(starts)
    beyond = {name: _amount(one, above + 1) for name, one in given.items()}
    return Price(**usual, long_prompt=LongPrompt(above=above, **beyond))


def _amount(price: Any, tokens: int) -> Any:
    """Return what a million tokens cost in a prompt of that length."""
    if isinstance(price, Decimal) or price is None:
        return price if price is None else float(price)
    fitting = [one.price for one in price.tiers if tokens > one.start]
    return float(fitting[-1] if fitting else price.base)


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


_LOG = logging.getLogger(__name__)

VARIABLES = ("STEPFLEET_PRICING_CONFIG", "SPARK_PRICING_CONFIG")
FILE_NAME = "model_pricing.json"
FOLDERS = (".", "~/.stepfleet", "~/.spark")
SHIPPED = "default_prices.json"
RECENT_SECONDS = 1.0


def find_pricing_file() -> Path | None:
    """Return the first pricing file of the search order, or None for the shipped table.

    A file that a variable names is returned even if it does not exist, so that a wrong name
    is noticed instead of skipped.
    """
    for variable in VARIABLES:
        if named := os.environ.get(variable):
            return Path(named).expanduser()
    for folder in FOLDERS:
        candidate = os.path.join(os.path.expanduser(folder), FILE_NAME)  # noqa: PTH111, PTH118 - runs per call; pathlib takes ten times as long
        if os.path.isfile(candidate):  # noqa: PTH113 - the same
            return Path(candidate)
    return None


def load_prices(path: str | Path | None = None) -> Prices:
    """Read the prices of `path`, or of the first file that the search finds.

    A file that cannot be read or is invalid leaves a warning and gives the shipped table.
    """
    chosen = Path(path) if path is not None else find_pricing_file()
    if chosen is None:
        return shipped_prices()
    try:
        prices = parse_prices(json.loads(chosen.read_text(encoding="utf-8")), str(chosen))
    except (OSError, ValueError, RecursionError, ConfigurationError) as error:
        _LOG.warning(
            "the pricing file %s cannot be used (%s): using the shipped prices instead; "
            "correct the file or unset %s",
            chosen,
            error,
            VARIABLES[0],
        )
        return shipped_prices()
    return replace(prices, base=shipped_prices())


@functools.cache
def shipped_prices() -> Prices:
    """Return the table that comes with the package, and the library's prices for what it lacks.

    A single price if even that is unusable.
    """
    try:
        text = resources.files(__package__).joinpath(SHIPPED).read_text(encoding="utf-8")
        return replace(parse_prices(json.loads(text), "the shipped prices"), known=known_price)
    except (OSError, ValueError, ConfigurationError) as error:
        _LOG.warning("the shipped prices cannot be read (%s): one price for all models", error)
        return Prices()


def current_prices() -> Prices:
    """Return the prices that the search finds now; a file is read again only when it changed."""
    chosen = find_pricing_file()
    if chosen is None:
        return shipped_prices()
    try:
        status = chosen.stat()
    except OSError:
        return _read(chosen, 0, 0)
    return _read(chosen, status.st_mtime_ns, status.st_size)


class RecentPrices:
    """The current prices for callers at every step: the file is checked once a second at most."""

    def __init__(self) -> None:
        self._prices = Prices()
        self._looked = -math.inf

    def prices(self) -> Prices:
        """Return the prices as of a second ago or later."""
        now = time.monotonic()
        if now - self._looked > RECENT_SECONDS:
            self._prices, self._looked = current_prices(), now
        return self._prices


@functools.lru_cache(maxsize=8)
def _read(path: Path, _changed_ns: int, _size: int) -> Prices:
    return load_prices(path)
