"""The settings of limits in Redis, and what is used of them as it is stored."""

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import orjson

from stepfleet.orchestrator.errors import ConfigurationError, StoreError
from stepfleet.orchestrator.limits.budgets import raising
from stepfleet.orchestrator.limits.limit import RUN, Limit, changed, kind_of, limit_of, set_for
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.admission.limit_use import (
    BudgetUse,
    LimitUse,
    budget_uses,
    state_of,
    use_of,
)
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
ENDED = frozenset({"completed", "failed", "cancelled"})


PARSED_AT_ONCE = 500
"""Limits that are read before others of the event loop have a turn."""
MOST_SHOWN = 1000
"""Names with budgets of which one call shows the use."""


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
            use_of(
                name, set_for(limits, name), state_of(stored.get(name)), waiting, now
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
                uses[name] = budget_uses(limit, *texts)
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
