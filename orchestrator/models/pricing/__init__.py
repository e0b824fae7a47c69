"""Costs of model calls: prices per million tokens, their sources, a ledger of calls.

Knows no provider and no store. Prices change without notice: the shipped table is a starting
point, a file of your own (see `loading`) is the truth.
"""

from stepfleet.orchestrator.models.pricing.ledger import (
    CostLedger,
    CostStatistics,
    ModelCall,
    ModelCosts,
    statistics_of,
)
from stepfleet.orchestrator.models.pricing.loading import (
    Pricing,
    RecentPrices,
    current_prices,
    find_pricing_file,
    load_prices,
    stated_cost,
)
from stepfleet.orchestrator.models.pricing.prices import Cost, Price, Prices
from stepfleet.orchestrator.records.usage import UsageStats

__all__ = [
    # prices
    "Cost",
    "RecentPrices",
    "Price",
    "Prices",
    "cost_of",
    "current_prices",
    "find_pricing_file",
    "load_prices",
    # prices of an agent's own
    "Pricing",
    "stated_cost",
    # the ledger
    "CostLedger",
    "CostStatistics",
    "ModelCall",
    "ModelCosts",
    "statistics_of",
]


def cost_of(model: str, usage: UsageStats) -> float:
    """Return the cost of `usage` of `model` in USD, by the prices that the search finds."""
    return current_prices().cost_of(model, usage)
