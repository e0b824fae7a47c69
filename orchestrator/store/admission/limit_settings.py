"""The settings of limits in Redis, and what is used of them."""

import asyncio
import logging
import math
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from decimal import Decimal
from types import MappingProxyType
from typing import Any

import orjson
from pydantic import Field

from stepfleet.orchestrator.errors import ConfigurationError, StoreError
from stepfleet.orchestrator.limits.budgets import FIELDS, KINDS, SCALES, raising
from stepfleet.orchestrator.limits.limit import RUN, Limit, changed, kind_of, limit_of
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.ledger import Usd
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.keys import Keys
from stepfleet.orchestrator.store.lua import run_script

log = logging.getLogger(__name__)

VERSION = "version"
NO_LIMITS: Mapping[str, Limit] = MappingProxyType({})
PROVIDED = "provided"
"""Marks a limit that comes from a configuration: the next worker's replaces it."""
LEARNED = "learned"
"""Marks the limit of a model that has none configured: what is known of it is in its state."""
SUBMITTED = "submitted"
"""When the run was submitted that a limit belongs to (ms): it goes with that."""
SETTLED_MS = 600_000
_WHOLE = re.compile(r"-?\d+")
ENDED = frozenset({"completed", "failed", "cancelled"})


class BudgetUse(Record):
    """A budget, in the unit of its field: what was spent, what calls under way may spend.

    `over` is by how much it was exceeded: calls cost more than they were expected to.
    """

    field: str
    budget: Usd
    spent: Usd
    reserved: Usd
    left: Usd
    over: Usd = Decimal(0)


class LimitUse(Record):
    """A limit and what is used of it at this moment.

    `in_flight` calls are under way or about to begin; `levels` are what is left of each rate in
    this moment (below 0: more was taken than there was), of the most that it can be, `rooms`:
    `burst` seconds of the rate. `waiting` steps wait in its line; `fix` is the command by which
    those go on that a spent budget holds. Nobody calls under it for `cool_seconds` more; `refused`
    calls got a 429. `learned` are rates per minute that the provider's headers and refusals have
    shown, where they are lower than the configured ones.
    """

    name: str
    limit: Limit | None = None
    in_flight: int = 0
    levels: dict[str, float] = Field(default_factory=dict)
    rooms: dict[str, float] = Field(default_factory=dict)
    waiting: int = 0
    cool_seconds: float = 0.0
    refused: int = 0
    learned: dict[str, float] = Field(default_factory=dict)
    waits_for: str = ""
    fix: str = ""
    budgets: tuple[BudgetUse, ...] = ()


_LEVELS = {
    "r": "requests_per_minute",
    "t": "tokens_per_minute",
    "i": "input_tokens_per_minute",
    "o": "output_tokens_per_minute",
    "s": "starts_per_minute",
}
_SHORT = {
    **_LEVELS,
    **FIELDS,
    "c": "a pause after a 429",
    "f": "calls in flight",
    "w": "a look into the ledger for the budgets",
}
PARSED_AT_ONCE = 500
"""Limits that are read before others of the event loop have a turn."""
RAISE = "; raise it: "
MOST_SHOWN = 1000
"""Names with budgets of which one call shows the use."""


def short_of(why: str) -> str:
    """Return for people what the script notes of a limit that has no room: `name kind`."""
    name, _, kind = why.rpartition(" ")
    shown = _SHORT.get(kind, kind)
    return f"{shown.replace('_', ' ')} of {name}" if name else ""


def raised_by(waits_for: str) -> str:
    """Return how those go on that wait for this; nothing where it is no budget."""
    shown, _, name = waits_for.partition(" of ")
    field = shown.replace(" ", "_")
    return f"{RAISE}{raising(name, field)}" if field in FIELDS.values() else ""


class LimitSettings:
    """Reads and writes the limits of a fleet."""

    def __init__(self, connection: Connection, found: Keys) -> None:
        self._connection = connection
        self._found = found
        self._settings = found.of(keys.LIMIT_SETTINGS)
        self._state = found.of(keys.LIMIT_STATE)
        self._lines = found.of(keys.LIMIT_LINES)
        self._spent = found.of(keys.LIMIT_SPENT)
        self._reserved = found.of(keys.LIMIT_RESERVED)
        self._parsed: dict[str, tuple[str, Limit | None]] = {}

    async def version(self) -> str:
        """Return what changes with every change of a limit; "" where none was ever set."""
        return await self._connection.execute("HGET", self._settings, VERSION) or ""

    async def read(self) -> tuple[str, dict[str, Limit]]:
        """Return the version and the limits. Raises `StoreError`, also for what is no limit."""
        version, stored = await self._texts()
        limits = {}
        for name, text in sorted(stored.items()):
            try:
                limits[name] = _read(name, text)
            except (ConfigurationError, ValueError, TypeError) as error:
                fix = f"write it again: {raising(name, 'FIELD')}"
                msg = f"a limit in Redis cannot be read: {name!r}: {error}; {fix}"
                raise StoreError(msg) from None
        return version, limits

    async def known(self) -> tuple[str, dict[str, Limit]]:
        """Return what `read` does; a limit that cannot be read has no fields, and is logged."""
        version, stored = await self._texts()
        before, self._parsed = self._parsed, {}
        limits = {}
        for number, (name, text) in enumerate(sorted(stored.items())):
            if number % PARSED_AT_ONCE == PARSED_AT_ONCE - 1:
                await asyncio.sleep(0)
            old = before.get(name)
            found = old[1] if old and old[0] == text else _readable(name, text)
            if found is None:
                log.error("the limit %r cannot be read and lets nobody through: set it", name)
            limits[name] = found or Limit.model_construct()
            self._parsed[name] = (text, found)
        return version, limits

    async def names(self) -> list[str]:
        """Return the names of all limits."""
        known = await self._connection.execute("HKEYS", self._settings)
        return sorted(name for name in known if name != VERSION)

    async def change(self, name: str, fields: Mapping[str, Any]) -> Limit:
        """Change fields of a limit, also while others change theirs; None takes one away.

        It holds for the next call. Raises `ConfigurationError` that names field and fix.
        """
        while True:
            text = await self._connection.execute("HGET", self._settings, name) or ""
            limit = changed(name, _readable(name, text), fields)
            if not limit.budgets:
                await self._forget([name])
            if await self._replace([(name, text, _stored(limit, **_marks(text)))]):
                return limit

    async def provide(self, limits: Mapping[str, Limit]) -> None:
        """Write limits of a configuration, but for names that somebody has set in Redis."""
        if not limits:
            return
        known = await self._connection.execute("HMGET", self._settings, *limits)
        texts = {name: _stored(limit, provided=True) for name, limit in limits.items()}
        await self._replace(
            (name, before or "", texts[name])
            for name, before in zip(limits, known, strict=True)
            if before != texts[name] and (not before or _is_replaced(before))
        )

    async def begin_with(
        self, limits: Mapping[str, Limit], configured: Mapping[str, Limit] = NO_LIMITS
    ) -> None:
        """Write limits, but for names that have one; those as `configured` are a configuration's.

        Learned ones are left out.
        """
        await self._replace(
            (name, "", _stored(one, provided=configured.get(name) == one))
            for name, one in limits.items()
            if one.model_fields_set
        )

    async def submitted(self, name: str, limit: Limit) -> bool:
        """Write the limit of a new run, unless there is one; return whether it did."""
        now = (await self._connection.now()).timestamp()
        text = _stored(limit, **{SUBMITTED: round(now * 1000)})
        return bool(await self._replace([(name, "", text)]))

    async def sweep(self, at: str) -> str:
        """Remove limits of runs that have ended, some at a time; return where to go on.

        Those of runs that a budget has stopped stay as long as these do: they may be retried.
        """
        at, page = await self._connection.execute("HSCAN", self._settings, at, "COUNT", 200)
        now = (await self._connection.now()).timestamp() * 1000
        found = {name: _marks(text).get(SUBMITTED, 0) for name, text in dict(page).items()}
        runs = [name for name, begun in found.items() if 0 < begun < now - SETTLED_MS]
        headers = (self._found.run(name.partition(":")[2]) for name in runs)
        states = await self._connection.execute_all(*(("HGET", key, "status") for key in headers))
        gone = [name for name, one in zip(runs, states, strict=True) if one is None or one in ENDED]
        await self.clear(gone)
        return str(at)

    async def clear(self, names: Collection[str]) -> int:
        """Remove limits; return how many there were."""
        if not names:
            return 0
        now = (await self._connection.now()).timestamp()
        gone, _ = await self._connection.execute_all(
            ("HDEL", self._settings, *names), ("HSET", self._settings, VERSION, round(now * 1e6))
        )
        await self._forget(names)
        return int(gone)

    async def _forget(self, names: Collection[str]) -> None:
        """Forget what names have spent that have no budgets: the ledger knows, if they get some."""
        whole = [name for name in names if not name.endswith(":*")]
        if whole:
            await self._connection.execute("HDEL", self._spent, *whole)
        for kind in (name.removesuffix("*") for name in names if name.endswith(":*")):
            at: str | None = None
            while at != "0":
                at, found = await self._page(f"{kind}*", at or "0")
                if found:
                    await self._connection.execute("HDEL", self._spent, *found)

    async def _page(self, pattern: str, at: str, count: int = 500) -> tuple[str, list[str]]:
        """Return where to go on, and some of the names that have spent."""
        page = ("HSCAN", self._spent, at, "MATCH", pattern, "COUNT", count)
        following, found = await self._connection.execute(*page)
        return str(following), list(dict(found))

    async def use(self) -> list[LimitUse]:
        """Return what is used of each limit, by name. Raises `StoreError` as `read` does."""
        _, limits = await self.read()
        execute = self._connection.execute
        stored = dict(await execute("HGETALL", self._state))
        flat = await execute("ZRANGE", self._lines, 0, -1, "WITHSCORES")
        waiting = dict(zip(flat[::2], map(int, map(float, flat[1::2])), strict=True))
        now = (await self._connection.now()).timestamp() * 1000
        names = {*limits, *waiting, *(name for name in stored if not name.startswith("*"))}
        budgets = await self._budgets(limits, names, int(now // 86_400_000))
        return [
            _use(name, limits.get(name), state_of(stored.get(name)), waiting, now).model_copy(
                update={"budgets": budgets.get(name, ())}
            )
            for name in sorted({*names, *budgets})
        ]

    async def _budgets(
        self, limits: Mapping[str, Limit], names: Collection[str], day: int
    ) -> dict[str, tuple[BudgetUse, ...]]:
        """Return the use of budgets by name; of those that hold for each, also who has spent."""
        if not any(one.budgets for one in limits.values()):
            return {}
        _, known = await self._page("*", "0", MOST_SHOWN)
        every = sorted({*names, *known})[: 2 * MOST_SHOWN]
        hashes = (self._spent, f"{self._spent}:{day}", self._reserved)
        found = await self._connection.execute_all(*(("HMGET", key, *every) for key in hashes))
        uses = {}
        for name, *texts in zip(every, *found, strict=True):
            limit = limits.get(name) or limits.get(f"{kind_of(name)}:*")
            if limit is not None and limit.budgets and kind_of(name) != RUN and name[-2:] != ":*":
                uses[name] = _budget_uses(limit, *texts)
        return uses

    async def _texts(self) -> tuple[str, dict[str, str]]:
        stored = dict(await self._connection.execute("HGETALL", self._settings))
        return stored.pop(VERSION, ""), stored

    async def _replace(self, changes: Iterable[tuple[str, str, str]]) -> int:
        """Write (name, text that was read, new text) where nobody was faster; return how many."""
        parts = [part for change in changes for part in change]
        if not parts:
            return 0
        return int(await run_script(self._connection, "replace", [self._settings], *parts))


def _stored(limit: Limit, **marks: int) -> str:
    own = {name: int(mark) for name, mark in marks.items() if mark}
    return orjson.dumps({**limit.model_dump(exclude_unset=True), **own}).decode()


def _marks(text: str | None) -> dict[str, int]:
    """Return whose limit it is, as far as that can be read."""
    with suppress(ValueError, AttributeError):
        found = orjson.loads(text or "{}").get(SUBMITTED)
        return {SUBMITTED: int(found)} if found else {}
    return {}


def _read(name: str, text: str) -> Limit:
    stored = orjson.loads(text)
    if not isinstance(stored, dict):
        raise TypeError(f"limit {name!r} is no table of fields")
    # A later release may know more fields; the script reads them all.
    fields = {field: stored[field] for field in Limit.model_fields if field in stored}
    says_something = fields.keys() - {"burst", "on_budget"}
    return limit_of(name, fields) if says_something else Limit.model_construct()


def _readable(name: str, text: str) -> Limit | None:
    with suppress(ConfigurationError, ValueError, TypeError):
        return _read(name, text) if text else None
    return None


def _is_replaced(text: str) -> bool:
    with suppress(ValueError):
        stored = orjson.loads(text)
        return isinstance(stored, dict) and bool(stored.get(PROVIDED) or stored.get(LEARNED))
    return False


def _budget_uses(limit: Limit, *texts: str | None) -> tuple[BudgetUse, ...]:
    """Return the use of a limit's budgets: spent in all, today, and reserved, as stored."""
    whole, today, reserved = (_numbers(text) for text in texts)
    uses = []
    for code, field in FIELDS.items():
        if field not in limit.budgets:
            continue
        scale = SCALES[code[0]]
        held = Decimal(reserved[code[0]]) / scale
        spent = Decimal((today if code.endswith("d") else whole)[code[0]]) / scale
        budget = Decimal(str(getattr(limit, field)))
        left, over = max(budget - spent - held, Decimal(0)), max(spent - budget, Decimal(0))
        numbers = {"budget": budget, "spent": spent, "reserved": held, "left": left, "over": over}
        uses.append(BudgetUse(field=field, **numbers))
    return tuple(uses)


def state_of(text: str | None) -> dict[str, Any]:
    """Return the stored level of a limit; nothing where it cannot be read, as the script does."""
    with suppress(ValueError):
        found = orjson.loads(text or "{}")
        return found if isinstance(found, dict) else {}
    return {}


def _numbers(text: str | None) -> dict[str, int]:
    parts = [int(one) for one in _WHOLE.findall(text or "")]
    return dict(zip(KINDS, (parts + [0] * len(KINDS))[: len(KINDS)], strict=True))


def _use(
    name: str, limit: Limit | None, state: dict[str, Any], waiting: Mapping[str, int], now: float
) -> LimitUse:
    waits_for = short_of(state.get("why", "")) if waiting.get(name) else ""
    learned = _learned(limit, state.get("l") or {})
    rooms, levels = _levels(limit, learned, state, now)
    return LimitUse(
        name=name,
        limit=limit if limit and limit.model_fields_set else None,
        in_flight=int(state.get("f", 0)),
        levels=levels,
        rooms=rooms,
        waiting=waiting.get(name, 0),
        cool_seconds=max(round((state.get("cool", 0) - now) / 1000, 1), 0.0),
        refused=int(state.get("refused", 0)),
        learned=learned,
        waits_for=waits_for,
        fix=raised_by(waits_for).removeprefix(RAISE),
    )


def _levels(
    limit: Limit | None, learned: Mapping[str, float], state: Mapping[str, Any], now: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the most that may be left of each rate, and what is left now: as the script counts."""
    gone = max(now - max(state.get("at", now), state.get("cool", 0)), 0) / 60_000
    rooms, levels = {}, {}
    for kind, field in _LEVELS.items():
        rate = min(getattr(limit, field, None) or math.inf, learned.get(field, math.inf))
        if rate < math.inf:
            most = max(rate / 60 * (limit.burst if limit else 1.0), 1)
            rooms[field] = round(most, 3)
            levels[field] = round(min(most, state.get(kind, most) + gone * rate), 3)
    return rooms, levels


def _learned(limit: Limit | None, known: Mapping[str, Any]) -> dict[str, float]:
    """Return the learned rates that hold: nothing for a limit that somebody has removed."""
    if limit is None:
        return {}
    rates = dict(known.get("said") or {})
    if known.get("r") is not None:
        rates["r"] = min(rates.get("r", known["r"]), known["r"])
    return {field: round(rates[kind], 1) for kind, field in _LEVELS.items() if kind in rates}
