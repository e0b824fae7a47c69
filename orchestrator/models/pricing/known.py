"""Prices of the library `genai-prices`, which workers have: those of most models that are sold.

Decides which of its entries is meant. The library is read once, at the first model that is looked
for; nothing is fetched. Clients have no library, and none of its prices.
"""

import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from stepfleet.orchestrator.models.pricing.prices import MAKERS, LongPrompt, Price
from stepfleet.orchestrator.models.pricing.tiers import tier_of

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
    """Return an entry as the fleet's price; None for one that is not by tokens of text."""
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
