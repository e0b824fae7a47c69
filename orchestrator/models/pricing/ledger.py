"""A ledger of model calls and its statistics. Kept in memory; stores keep the records."""

from collections.abc import Iterable
from datetime import UTC, datetime

from pydantic import Field

from stepfleet.orchestrator.models.pricing.loading import current_prices
from stepfleet.orchestrator.models.pricing.prices import Prices
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.usage import UsageStats


class ModelCall(Record):
    """One call and its cost in USD, fixed when it was recorded."""

    model_id: str
    input_tokens: int = Field(ge=0)
    output_tokens: int = Field(ge=0)
    cost: float
    timestamp: datetime


class ModelCosts(Record):
    """Sums over the calls of one model; `cost` in USD."""

    calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    tokens: int = 0
    cost: float = 0.0

    def plus(self, call: ModelCall) -> "ModelCosts":
        """Return the sums with `call` added."""
        return ModelCosts(
            calls=self.calls + 1,
            input_tokens=self.input_tokens + call.input_tokens,
            output_tokens=self.output_tokens + call.output_tokens,
            tokens=self.tokens + call.input_tokens + call.output_tokens,
            cost=self.cost + call.cost,
        )


class CostStatistics(Record):
    """Sums over all calls, and by model; zeros and an empty mapping without calls."""

    total_calls: int = 0
    total_tokens: int = 0
    total_cost: float = 0.0
    by_model: dict[str, ModelCosts] = Field(default_factory=dict)


def statistics_of(calls: Iterable[ModelCall]) -> CostStatistics:
    """Return the statistics of `calls`."""
    by_model: dict[str, ModelCosts] = {}
    for call in calls:
        by_model[call.model_id] = by_model.get(call.model_id, ModelCosts()).plus(call)
    return CostStatistics(
        total_calls=sum(one.calls for one in by_model.values()),
        total_tokens=sum(one.tokens for one in by_model.values()),
        total_cost=sum(one.cost for one in by_model.values()),
        by_model=by_model,
    )


class CostLedger:
    """Records calls with their cost. `prices` None means: those that the search finds."""

    def __init__(self, prices: Prices | None = None) -> None:
        self._prices = prices
        self._calls: list[ModelCall] = []

    @property
    def calls(self) -> tuple[ModelCall, ...]:
        """All calls, in the order in which they were recorded."""
        return tuple(self._calls)

    def record_call(
        self,
        model_id: str,
        input_tokens: int,
        output_tokens: int,
        timestamp: datetime | None = None,
    ) -> ModelCall:
        """Record one call and return it with its cost; `timestamp` is now (UTC) if not given."""
        usage = UsageStats(prompt_tokens=input_tokens, completion_tokens=output_tokens)
        call = ModelCall(
            model_id=model_id,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            cost=(self._prices or current_prices()).cost_of(model_id, usage),
            timestamp=timestamp or datetime.now(UTC),
        )
        self._calls.append(call)
        return call

    def statistics(self) -> CostStatistics:
        """Return the sums over everything recorded so far."""
        return statistics_of(self._calls)

    def reset(self) -> None:
        """Forget all calls."""
        self._calls.clear()
