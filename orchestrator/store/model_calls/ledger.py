"""The ledger of model calls as it is stored: lines that commits enter, and rows that are read.

Scripts sum lines up (see ledger.lua); here are the form of a line, and the reader.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache

import orjson

from stepfleet.orchestrator.records.ledger import (
    STANDARD,
    CallState,
    CallSums,
    LedgerRow,
    bare_name,
    lane_of,
)
from stepfleet.orchestrator.records.steps import LoggedStep
from stepfleet.orchestrator.records.usage import UsageStats, nano_usd
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store.keys import Keys
from stepfleet.orchestrator.store.lua import run_script

EPOCH = date(1970, 1, 1)
LONGEST_NAME = 100
"""Characters of a model's name, which its provider chooses."""
DAYS_AT_ONCE = 2
_SECONDS = 86_400
_SEPARATOR = "\x1e"
_NOTHING = UsageStats()


@dataclass(frozen=True, slots=True)
class Payer:
    """Whose calls are entered: the parts of a line that a step does not know.

    `model` is the agent's.
    """

    tenant: str
    agent: str
    batch: str
    model: str


def calls_of(logged: LoggedStep) -> Iterator[tuple[CallState, str, str, CallSums]]:
    """Yield the model calls of a committed step: state, model, lane, numbers."""
    result = logged.result
    lane = lane_of(result.service_tier)
    usage, cost = result.usage or _NOTHING, nano_usd(result.cost_usd)
    summary = logged.remembered.summary if logged.remembered else None
    if summary is not None:
        own = nano_usd(summary.cost_usd)
        usage, cost = usage - summary.usage, cost - own
        sums = CallSums.of(summary.usage, calls=1, cost=own)
        sums = _marked(sums, known=summary.usage_reported)
        yield CallState.COMMITTED, summary.model, lane_of(summary.service_tier), sums
    if result.cache is not None and result.cache.hit:
        saved = nano_usd(result.cache.saved_usd)
        yield CallState.CACHED, result.model or "", lane, CallSums(calls=1, saved=saved)
    elif usage.llm_calls:
        sums = CallSums.of(usage, calls=usage.llm_calls, cost=cost)
        sums = _marked(sums, known=result.usage_reported)
        yield CallState.COMMITTED, result.model or "", lane, sums


def default_priced(
    logged: LoggedStep, payer: Payer, has_price: Callable[[str], bool]
) -> tuple[str, ...]:
    """Return the models of a step's calls that have no price in any table, as `has_price` says."""
    result, called = logged.result, []
    if result.usage and result.usage.llm_calls and not result.cached:
        called = [_named(result.model or "", payer)]
    if logged.remembered and logged.remembered.summary:
        called.append(_named(logged.remembered.summary.model, payer))
    return tuple(model for model in called if not has_price(model))


def _named(model: str, payer: Payer) -> str:
    return bare_name(payer.model) if model in ("", payer.model) else model


def _marked(sums: CallSums, *, known: bool) -> CallSums:
    return sums if known else replace(sums, estimated=sums.calls)


def lines_of(logged: LoggedStep, payer: Payer, *, sign: int = 1) -> str:
    """Return the lines of a committed step's calls; '' for none. A `sign` of -1 takes them back."""
    lines = []
    for state, named, lane, sums in calls_of(logged):
        model = _named(named, payer)
        if state is CallState.COMMITTED and model in logged.default_priced:
            sums = replace(sums, default_priced=sums.calls)  # noqa: PLW2901 - the same call
        at = logged.committed_at or logged.result.started_at
        numbers = " ".join([str(one * sign) for one in sums.numbers])
        parts = (state.value, payer.tenant, payer.agent, model[:LONGEST_NAME])
        whose = _whose(*parts) if lane == STANDARD else _whose(*parts, lane)
        lines.append(f"{int(at.timestamp()) // _SECONDS} {numbers}\n{whose}\n{payer.batch}")
    return _SEPARATOR.join(lines)


@lru_cache(maxsize=1024)
def _whose(*parts: str) -> str:
    return orjson.dumps(parts).decode()


class Ledger:
    """Reads the ledger of one store."""

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys

    async def today(self) -> date:
        """Return the day (UTC) by Redis's clock."""
        return (await self._connection.now()).astimezone(UTC).date()

    async def rows(self, since: date, until: date) -> AsyncIterator[LedgerRow]:
        """Yield the rows of these days, of all shards. Raises `StoreError`."""
        days = [since + timedelta(days=n) for n in range((until - since).days + 1)]
        for first in range(0, len(days), DAYS_AT_ONCE):
            part = days[first : first + DAYS_AT_ONCE]
            places = [(day, shard) for day in part for shard in range(self._keys.shards)]
            found = await asyncio.gather(*(self._read(*place) for place in places))
            for (day, _), (stored, lines) in zip(places, found, strict=True):
                for row in _rows(day, stored, lines):
                    yield row
                await asyncio.sleep(0)  # what waits beside it has its turn

    async def _read(self, day: date, shard: int) -> tuple[list[str], list[str]]:
        number = (day - EPOCH).days
        costs = f"{self._keys.tag(shard)}costs"
        keys = [costs, f"{costs}:{number}"]
        stored, lines = await run_script(self._connection, "costs", keys, number)
        return stored, lines


def _rows(day: date, stored: list[str], lines: list[str]) -> Iterator[LedgerRow]:
    for pair in zip(stored[::2], stored[1::2], strict=True):
        yield _row(day, *pair)
    for line in lines:
        numbers, _, name = line.partition("\n")
        yield _row(day, name, numbers.partition(" ")[2])


def _row(day: date, name: str, numbers: str) -> LedgerRow:
    whose, _, batch = name.partition("\n")
    state, tenant, agent, model, *lanes = orjson.loads(whose)
    known = [int(one) for one in numbers.split()][: len(CallSums.__dataclass_fields__)]
    lane = lanes[0] if lanes else "*" if agent == model == "*" else STANDARD
    return LedgerRow(day, state, tenant, agent, model, batch, CallSums(*known), lane)


def day_of(given: date | datetime) -> date:
    """Return the day (UTC) of a date or a time."""
    if isinstance(given, datetime):
        return given.astimezone(UTC).date()
    return given
