"""The ledger of model calls: one line per call that was or may have been paid, and sums of lines.

Pure. Amounts are whole billionths of a dollar inside and `Decimal` outside, so sums are exact.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, PlainSerializer

from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.usage import NANO, UsageStats

Usd = Annotated[Decimal, PlainSerializer(lambda value: f"{value:f}", when_used="json")]
"""An exact amount; in JSON its digits as text, without an exponent."""
CostKey = Literal["day", "tenant", "batch", "agent", "model", "lane", "status"]
COST_KEYS: tuple[CostKey, ...] = ("day", "tenant", "batch", "agent", "model", "lane", "status")
STANDARD = "standard"
LANES = (STANDARD, "flex", "priority", "batch", "window", "fast", "scale", "reserved", "other")
"""The tiers that the ledger tells apart; what else servers name is `other`."""


class CallState(StrEnum):
    """What became of a model call."""

    COMMITTED = "committed"
    """Its step was committed."""
    LOST = "lost"
    """It was paid for, and its step was not committed: its price is known."""
    AMBIGUOUS = "ambiguous"
    """It may have been paid for; its price is an estimate, or not known."""
    CACHED = "cached"
    """The response cache answered in its place: no call was made."""


class CallSums(NamedTuple):
    """Numbers of calls, in the order in which they are stored. Money is in billionths of a USD."""

    calls: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    audio_tokens: int = 0
    cost: int = 0
    saved: int = 0
    default_priced: int = 0
    unpriced: int = 0
    estimated: int = 0

    @classmethod
    def of(cls, usage: UsageStats, calls: int, cost: int, *, is_known: bool = True) -> "CallSums":
        """Return the numbers of `calls` with that usage and cost, estimated unless it is known."""
        return cls(
            calls,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.cache_write_tokens,
            usage.completion_tokens,
            usage.reasoning_tokens,
            usage.audio_tokens,
            cost,
            estimated=0 if is_known else calls,
        )

    def plus(self, other: "CallSums") -> "CallSums":
        """Return the sums of both."""
        return CallSums(*map(operator.add, self, other))


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """The calls of one day (UTC) that agree in everything that the ledger counts by.

    `*` stands for all values of a day that has too many different ones. `lane` is one of `LANES`.
    """

    day: date
    state: str
    tenant: str
    agent: str
    model: str
    batch: str
    sums: CallSums
    lane: str = STANDARD


class CostLine(Record):
    """One model call. `attempt` counts the attempts at its step from 1.

    `lane` is the provider's tier in which it was served, one of `LANES`. `price_estimated` is true
    for the default price, since no table has the model. `usd` is None where no price is known;
    `time` is when its step was committed, or its loss noted.
    """

    run_id: str
    step: int
    attempt: int = 1
    batch_id: str | None = None
    tenant: str | None = None
    agent: str
    model: str | None = None
    lane: str = STANDARD
    request_id: str | None = None
    state: CallState
    input_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    audio_tokens: int = 0
    usd: Usd | None = None
    saved_usd: Usd = Decimal(0)
    estimated: bool = False
    price_estimated: bool = False
    time: datetime | None = None


class CostRow(Record):
    """Sums over model calls. `group` has the values that its calls share.

    `usd` was paid: `committed_usd`, and `lost_usd` for answers that no step has. `ambiguous_usd`,
    the estimates of what else may have been paid, is not part of it, nor are
    `ambiguous_calls` of `calls` and their tokens of the others. `unpriced_calls` are those of them
    without any price. `default_priced_calls` had the default price, as no table has their model.
    `cached_calls` were not made, and have saved `saved_usd`. `input_tokens` include those read
    from the provider's cache and written to it, `output_tokens` those of reasoning.
    """

    group: dict[str, str] = Field(default_factory=dict)
    calls: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    audio_tokens: int = 0
    usd: Usd = Decimal(0)
    committed_usd: Usd = Decimal(0)
    lost_calls: int = 0
    lost_usd: Usd = Decimal(0)
    ambiguous_calls: int = 0
    ambiguous_tokens: int = 0
    ambiguous_usd: Usd = Decimal(0)
    unpriced_calls: int = 0
    cached_calls: int = 0
    saved_usd: Usd = Decimal(0)
    default_priced_calls: int = 0
    estimated_calls: int = 0


class Costs(Record):
    """What model calls have cost, by `by`, the most expensive first, and in `total`.

    From `since` to `until`, whole days in UTC. `unpriced_models` had the default price, as no table
    names them: their costs are guesses until `model_pricing.json` does.
    """

    by: tuple[str, ...] = ()
    since: date
    until: date
    rows: tuple[CostRow, ...] = ()
    total: CostRow = CostRow()
    unpriced_models: tuple[str, ...] = ()


def bare_name(model: str) -> str:
    """Return a requested model without its provider, as answers name it."""
    return model.partition(":")[2] or model


def lane_of(tier: str) -> str:
    """Return the lane of a call by its provider's tier, "" for the standard one."""
    if not tier:
        return STANDARD
    return tier if tier in LANES else LANES[-1]


def value_of(row: LedgerRow, key: CostKey) -> str:
    """Return a row's value of a key."""
    if key == "day":
        return row.day.isoformat()
    return str(getattr(row, "state" if key == "status" else key))


class Summing:
    """Sums rows by `by`, one after the other: a store may have millions of them."""

    def __init__(self, by: tuple[CostKey, ...]) -> None:
        self._by = by
        self._groups: dict[tuple[str, ...], dict[str, CallSums]] = {}
        self._whole: dict[str, CallSums] = {}
        self._guessed: dict[str, int] = {}

    def add(self, row: LedgerRow) -> None:
        """Add a row."""
        group = self._groups.setdefault(tuple(value_of(row, key) for key in self._by), {})
        for sums in (group, self._whole):
            sums[row.state] = sums.get(row.state, CallSums()).plus(row.sums)
        self._guessed[row.model] = self._guessed.get(row.model, 0) + row.sums.default_priced

    def costs(self, since: date, until: date) -> Costs:
        """Return the sums of all rows; they are of these days."""
        by = self._by
        found = [
            _row(dict(zip(by, values, strict=True)), states)
            for values, states in sorted(self._groups.items())
            if any(any(sums) for sums in states.values())
        ]
        if by and by[0] != "day":
            found.sort(key=lambda row: -(row.usd + row.ambiguous_usd))
        return Costs(
            by=by,
            since=since,
            until=until,
            rows=tuple(found) if by else (),
            total=_row({}, self._whole),
            unpriced_models=tuple(sorted(name for name, n in self._guessed.items() if n > 0)),
        )


def exact_usd(nano: int) -> Decimal:
    """Return billionths of a dollar as dollars, exactly."""
    return Decimal(nano) / NANO


def _row(group: dict[str, str], states: Mapping[str, CallSums]) -> CostRow:
    nothing = CallSums()
    committed = states.get(CallState.COMMITTED, nothing)
    lost = states.get(CallState.LOST, nothing)
    ambiguous = states.get(CallState.AMBIGUOUS, nothing)
    cached = states.get(CallState.CACHED, nothing)
    paid = committed.plus(lost)
    return CostRow(
        group=group,
        calls=paid.calls,
        input_tokens=paid.input_tokens,
        cached_tokens=paid.cached_tokens,
        cache_write_tokens=paid.cache_write_tokens,
        output_tokens=paid.output_tokens,
        reasoning_tokens=paid.reasoning_tokens,
        audio_tokens=paid.audio_tokens,
        usd=exact_usd(paid.cost),
        committed_usd=exact_usd(committed.cost),
        lost_calls=lost.calls,
        lost_usd=exact_usd(lost.cost),
        ambiguous_calls=ambiguous.calls,
        ambiguous_tokens=ambiguous.input_tokens + ambiguous.output_tokens,
        ambiguous_usd=exact_usd(ambiguous.cost),
        unpriced_calls=ambiguous.unpriced,
        cached_calls=cached.calls,
        saved_usd=exact_usd(cached.saved),
        default_priced_calls=paid.default_priced,
        estimated_calls=paid.estimated,
    )
