"""The settings of limits in Redis, and what is used of them."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from decimal import Decimal
from typing import Any

import orjson
from pydantic import Field

from stepfleet.orchestrator.errors import ConfigurationError, StoreError
from stepfleet.orchestrator.limits.budgets import FIELDS, KINDS, SCALES
from stepfleet.orchestrator.limits.limit import RUN, Limit, kind_of, limit_of
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.ledger import Usd
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.keys import Keys

VERSION = "version"
PROVIDED = "provided"
"""Marks a limit that comes from a configuration: the next worker's replaces it."""
LEARNED = "learned"
"""Marks the limit of a model that has none configured: what is known of it is in its state."""


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

    `in_flight` calls are under way or about to begin; `levels` are what is left of each rate
    (below 0: more was taken than there was); `waiting` steps wait in its line. Nobody calls under
    it for `cool_seconds` more; `refused` calls got a 429. `learned` are rates per minute that the
    provider's headers and refusals have shown, where they are lower than the configured ones.
    """

    name: str
    limit: Limit | None = None
    in_flight: int = 0
    levels: dict[str, float] = Field(default_factory=dict)
    waiting: int = 0
    cool_seconds: float = 0.0
    refused: int = 0
    learned: dict[str, float] = Field(default_factory=dict)
    waits_for: str = ""
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
MOST_SHOWN = 1000
"""Names with budgets of which one call shows the use."""


def short_of(why: str) -> str:
    """Return for people what the script notes of a limit that has no room: `name kind`."""
    name, _, kind = why.rpartition(" ")
    shown = _SHORT.get(kind, kind)
    return f"{shown.replace('_', ' ')} of {name}" if name else ""


class LimitSettings:
    """Reads and writes the limits of a fleet."""

    def __init__(self, connection: Connection, found: Keys) -> None:
        self._connection = connection
        self._settings = found.of(keys.LIMIT_SETTINGS)
        self._state = found.of(keys.LIMIT_STATE)
        self._lines = found.of(keys.LIMIT_LINES)
        self._spent = found.of(keys.LIMIT_SPENT)
        self._reserved = found.of(keys.LIMIT_RESERVED)

    async def version(self) -> str:
        """Return what changes with every change of a limit; "" where none was ever set."""
        return await self._connection.execute("HGET", self._settings, VERSION) or ""

    async def read(self) -> tuple[str, dict[str, Limit]]:
        """Return the version and the limits. Raises `StoreError`, also for what is no limit."""
        stored = dict(await self._connection.execute("HGETALL", self._settings))
        version = stored.pop(VERSION, "")
        try:
            limits = {name: _read(name, text) for name, text in stored.items()}
        except (ConfigurationError, ValueError, TypeError) as error:
            msg = f"a limit in Redis cannot be read: {error}; write it again (stepfleet limits set)"
            raise StoreError(msg) from None
        return version, dict(sorted(limits.items()))

    async def one(self, name: str) -> Limit | None:
        """Return the limit of that name; None where there is none, or none that can be read."""
        text = await self._connection.execute("HGET", self._settings, name)
        with suppress(ConfigurationError, ValueError, TypeError):
            return _read(name, text) if text else None
        return None

    async def names(self) -> list[str]:
        """Return the names of all limits."""
        known = await self._connection.execute("HKEYS", self._settings)
        return sorted(name for name in known if name != VERSION)

    async def set(self, limits: Mapping[str, Limit]) -> None:
        """Write limits, each as a whole. They hold for the next call; learned ones are left out."""
        given = {name: one for name, one in limits.items() if one.model_fields_set}
        texts = [part for name, one in given.items() for part in (name, _stored(one))]
        if texts:
            await self._forget([name for name, one in limits.items() if not one.budgets])
            await self._change(("HSET", self._settings, *texts))

    async def provide(self, limits: Mapping[str, Limit]) -> None:
        """Write limits of a configuration, but for names that somebody has set in Redis."""
        if not limits:
            return
        known = await self._connection.execute("HMGET", self._settings, *limits)
        texts = []
        for (name, limit), text in zip(limits.items(), known, strict=True):
            provided = _stored(limit, provided=True)
            if text != provided and (text is None or _is_replaced(orjson.loads(text))):
                texts += [name, provided]
        if texts:
            await self._change(("HSET", self._settings, *texts))

    async def begin_with(self, limits: Mapping[str, Limit]) -> None:
        """Write limits, but for names that have one already."""
        known = await self._connection.execute("HMGET", self._settings, *limits)
        await self.set(
            {name: limits[name] for name, text in zip(limits, known, strict=True) if text is None}
        )

    async def clear(self, names: Collection[str]) -> int:
        """Remove limits; return how many there were."""
        if not names:
            return 0
        gone = int(await self._change(("HDEL", self._settings, *names)))
        await self._forget(names)
        return gone

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
            _use(
                name, limits.get(name), orjson.loads(stored.get(name, "{}")), waiting, now
            ).model_copy(update={"budgets": budgets.get(name, ())})
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

    async def _change(self, command: tuple[Any, ...]) -> Any:
        reply, _ = await self._connection.execute_all(
            command, ("HINCRBY", self._settings, VERSION, 1)
        )
        return reply


def _is_replaced(stored: Mapping[str, Any]) -> bool:
    return bool(stored.get(PROVIDED) or stored.get(LEARNED))


def _stored(limit: Limit, *, provided: bool = False) -> str:
    fields = limit.model_dump(exclude_unset=True)
    return orjson.dumps({**fields, PROVIDED: 1} if provided else fields).decode()


def _read(name: str, text: str) -> Limit:
    stored = orjson.loads(text)
    # A later release may know more fields; the script reads them all.
    fields = {field: stored[field] for field in Limit.model_fields if field in stored}
    says_something = fields.keys() - {"burst", "on_budget"}
    return limit_of(name, fields) if says_something else Limit.model_construct()


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


def _numbers(text: str | None) -> dict[str, int]:
    parts = [int(one) for one in (text or "0 0 0 0").split()]
    return dict(zip(KINDS, parts[: len(KINDS)], strict=True))


def _use(
    name: str, limit: Limit | None, state: dict[str, Any], waiting: Mapping[str, int], now: float
) -> LimitUse:
    return LimitUse(
        name=name,
        limit=limit if limit and limit.model_fields_set else None,
        in_flight=int(state.get("f", 0)),
        levels={field: round(state[kind], 3) for kind, field in _LEVELS.items() if kind in state},
        waiting=waiting.get(name, 0),
        cool_seconds=max(round((state.get("cool", 0) - now) / 1000, 1), 0.0),
        refused=int(state.get("refused", 0)),
        learned=_learned(limit, state.get("l") or {}),
        waits_for=short_of(state.get("why", "")) if waiting.get(name) else "",
    )


def _learned(limit: Limit | None, known: Mapping[str, Any]) -> dict[str, float]:
    """Return the learned rates that hold: nothing for a limit that somebody has removed."""
    if limit is None:
        return {}
    rates = dict(known.get("said") or {})
    if known.get("r") is not None:
        rates["r"] = min(rates.get("r", known["r"]), known["r"])
    return {field: round(rates[kind], 1) for kind, field in _LEVELS.items() if kind in rates}
