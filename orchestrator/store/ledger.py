"""The ledger of model calls as it is stored: lines that commits enter, and rows that are read.

Scripts sum lines up (see ledger.lua); here are the form of a line, and the reader.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from typing import Any, NamedTuple

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
from stepfleet.orchestrator.store.gateway import Gateway
from stepfleet.orchestrator.store.lua import run_script

EPOCH = date(1970, 1, 1)
LONGEST_NAME = 100
"""Characters of a model's name, which its provider chooses."""
DAYS_AT_ONCE = 2
NEWEST_DAYS = 2
"""Their rows are read in one moment with the lines, which are summed into them."""
NAMES_AT_ONCE = 10
SCANS_AT_ONCE = 16
ROWS_AT_ONCE = 500
"""Rows that one command looks through: a third of a millisecond of Redis."""
_SECONDS = 86_400
_SEPARATOR = "\x1e"
_NUMBERS = " ".join(["%d"] * len(CallSums._fields))
"""Their text at once: one after the other takes twice as long."""
_NOTHING = UsageStats()
_BATCH = "batch:"
_OTHERS = re.compile(r"[^\w .@:-]+", re.ASCII)
"""Characters that JSON may write in several ways, or that mean something in a pattern."""


class Payer(NamedTuple):
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
        sums = CallSums.of(summary.usage, 1, own, is_known=summary.usage_reported)
        yield CallState.COMMITTED, summary.model, lane_of(summary.service_tier), sums
    if result.cache is not None and result.cache.hit:
        saved = nano_usd(result.cache.saved_usd)
        yield CallState.CACHED, result.model or "", lane, CallSums(calls=1, saved=saved)
    elif usage.llm_calls:
        sums = CallSums.of(usage, usage.llm_calls, cost, is_known=result.usage_reported)
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


def lines_of(logged: LoggedStep, payer: Payer, *, sign: int = 1) -> str:
    """Return the lines of a committed step's calls; '' for none. A `sign` of -1 takes them back."""
    lines = []
    for state, named, lane, sums in calls_of(logged):
        model = _named(named, payer)
        if state is CallState.COMMITTED and model in logged.default_priced:
            sums = sums._replace(default_priced=sums.calls)  # noqa: PLW2901 - the same call
        numbers = _NUMBERS % (sums if sign > 0 else tuple([-one for one in sums]))
        at = logged.committed_at or logged.result.started_at
        parts = (state.value, payer.tenant, payer.agent, model[:LONGEST_NAME])
        whose = _whose(*parts) if lane == STANDARD else _whose(*parts, lane)
        lines.append(f"{int(at.timestamp()) // _SECONDS} {numbers}\n{whose}\n{payer.batch}")
    return _SEPARATOR.join(lines)


@lru_cache(maxsize=1024)
def _whose(*parts: str) -> str:
    return orjson.dumps(parts).decode()


class Ledger(Gateway):
    """Reads the ledger of one store."""

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
                await asyncio.sleep(0)  # other tasks have their turn

    async def rows_of(
        self, names: Collection[str], days: int
    ) -> AsyncIterator[tuple[set[str], LedgerRow]]:
        """Yield the rows of the last `days` of tenants, agents and batches, each with its names.

        Names are like `tenant:acme`. What is new has none, and that is known without a look through
        the days. Raises `StoreError`.
        """
        today = await self.today()
        first = {name: today - timedelta(days=days) for name in names}
        first |= await self._created(names)
        ordered = sorted(names)
        for at in range(0, len(ordered), NAMES_AT_ONCE):
            part = {name: first[name] for name in ordered[at : at + NAMES_AT_ONCE]}
            for shard in range(self._keys.shards):
                async for found in self._of_shard(shard, part, today):
                    yield found

    async def _of_shard(
        self, shard: int, first: Mapping[str, date], today: date
    ) -> AsyncIterator[tuple[set[str], LedgerRow]]:
        """Yield a shard's rows of names, each from its first day on."""
        newest = [today - timedelta(days=n) for n in range(NEWEST_DAYS)]
        lines, last, is_kept, rows = await self._newest(shard, list(first), newest)
        found = list(map(_row_of_line, lines))
        for day, stored in zip(newest, rows, strict=True):
            found += _rows(day, _distinct(stored), [])
        for row in found:
            if of := {name for name in _names(row) if name in first and first[name] <= row.day}:
                yield of, row
        since, *known = (None if one is None else EPOCH + timedelta(days=int(one)) for one in last)
        if not is_kept:
            since = today
        spans = (
            (name, first[name], min(until, newest[-1] - timedelta(days=1)))
            for name, one in zip(first, known, strict=True)
            if (until := one or since) is not None
        )
        for name, begin, end in spans:
            async for row in self._older(shard, name, list(_days(begin, end))):
                yield {name}, row

    async def _newest(self, shard: int, names: list[str], days: list[date]) -> Any:
        costs = f"{self._keys.tag(shard)}costs"
        numbers = [(day - EPOCH).days for day in days]
        keys = [costs, f"{costs}-names", *(f"{costs}:{number}" for number in numbers)]
        patterns = map(_pattern, names)
        args = (len(names), *names, *patterns, *numbers)
        return await run_script(self._connection, "costs_of", keys, *args)

    async def _older(self, shard: int, name: str, days: list[date]) -> AsyncIterator[LedgerRow]:
        """Yield a shard's rows of a name on days that are over."""
        keys = [f"{self._keys.tag(shard)}costs:{(day - EPOCH).days}" for day in days]
        sizes = await self._connection.execute_all(*(("HLEN", key) for key in keys))
        found_in = zip(days, keys, sizes, strict=True)
        places = [(day, key) for day, key, size in found_in if size]
        for at in range(0, len(places), SCANS_AT_ONCE):
            part = places[at : at + SCANS_AT_ONCE]
            found = await asyncio.gather(*(self._scan(key, _pattern(name)) for _, key in part))
            for (day, _), stored in zip(part, found, strict=True):
                for row in _rows(day, stored, []):
                    if name in _names(row):  # each name is looked for by itself
                        yield row

    async def _created(self, names: Collection[str]) -> dict[str, date]:
        """Return the days before which batches had no calls."""
        batches = [name for name in names if name.startswith(_BATCH)]
        keys = [self._keys.manifest(name.removeprefix(_BATCH)) for name in batches]
        found = await self._connection.execute_all(*(("HGET", key, "created") for key in keys))
        return {
            name: datetime.fromtimestamp(int(created) / 1000, UTC).date()
            for name, created in zip(batches, found, strict=True)
            if created
        }

    async def _scan(self, key: str, pattern: str) -> list[str]:
        """Return the rows of a day that match a pattern."""
        at, found = "0", dict[str, str]()
        while True:
            page = ("HSCAN", key, at, "MATCH", pattern, "COUNT", ROWS_AT_ONCE)
            at, rows = await self._connection.execute(*page)
            found |= dict(rows)
            if str(at) == "0":
                return [part for pair in found.items() for part in pair]

    async def _read(self, day: date, shard: int) -> tuple[list[str], list[str]]:
        number = (day - EPOCH).days
        costs = f"{self._keys.tag(shard)}costs"
        keys = [costs, f"{costs}:{number}"]
        stored, lines = await run_script(self._connection, "costs", keys, number)
        return stored, lines


def _pattern(name: str) -> str:
    """Return what matches the rows of a name, whichever way JSON writes it, and perhaps others."""
    kind, _, value = name.partition(":")
    plain = _OTHERS.sub("*", value)
    if kind == "batch":
        return f"*\n{plain}"
    before = '"*",' if kind == "tenant" else '"*","*",'
    return f'\\[{before}"{plain}","*'


def _names(row: LedgerRow) -> tuple[str, ...]:
    return (f"tenant:{row.tenant}", f"batch:{row.batch}", f"agent:{row.agent}")


def _distinct(stored: list[str]) -> list[str]:
    rows = dict(zip(stored[::2], stored[1::2], strict=True))
    return [part for pair in rows.items() for part in pair]


def _days(first: date, last: date) -> Iterator[date]:
    return (first + timedelta(days=n) for n in range((last - first).days + 1))


def _row_of_line(line: str) -> LedgerRow:
    numbers, _, name = line.partition("\n")
    number, _, numbers = numbers.partition(" ")
    return _row(EPOCH + timedelta(days=int(number)), name, numbers)


def _rows(day: date, stored: list[str], lines: list[str]) -> Iterator[LedgerRow]:
    for pair in zip(stored[::2], stored[1::2], strict=True):
        yield _row(day, *pair)
    yield from map(_row_of_line, lines)


def _row(day: date, name: str, numbers: str) -> LedgerRow:
    whose, _, batch = name.partition("\n")
    state, tenant, agent, model, *lanes = orjson.loads(whose)
    known = [int(one) for one in numbers.split()][: len(CallSums._fields)]
    lane = lanes[0] if lanes else "*" if agent == model == "*" else STANDARD
    return LedgerRow(day, state, tenant, agent, model, batch, CallSums(*known), lane)


def day_of(given: date | datetime) -> date:
    """Return the day (UTC) of a date or a time."""
    if isinstance(given, datetime):
        return given.astimezone(UTC).date()
    return given
