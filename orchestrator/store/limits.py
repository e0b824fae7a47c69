"""The limits of a fleet in Redis: their settings, what is used of them, and who waits for which.

The script `admit` decides who may call; nothing here does. Reads a bounded number of names: with a
limit for each tenant or batch there may be many.
"""

import asyncio
import logging
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from types import MappingProxyType
from typing import Any

import orjson
from pydantic import Field

from stepfleet.orchestrator.errors import ConfigurationError, StoreError
from stepfleet.orchestrator.limits.budgets import FIELDS, KINDS, SCALES, raising
from stepfleet.orchestrator.limits.limit import (
    NO_LIMIT,
    RUN,
    Limit,
    changed,
    kind_of,
    limit_of,
    set_for,
)
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.ledger import Usd
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.gateway import Gateway, Opened
from stepfleet.orchestrator.store.lua import run_script

log = logging.getLogger(__name__)

RAISE = "; raise it: "
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
SHOWN = 5
"""Lines that an overview has: the longest."""
MEASURED = 100
"""Limits that metrics have."""
_WHOLE = re.compile(r"-?\d+")
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


def short_of(why: str) -> str:
    """Return for people what the script notes of a limit that has no room: `name kind`."""
    name, _, kind = why.rpartition(" ")
    shown = _SHORT.get(kind, kind)
    return f"{shown.replace('_', ' ')} of {name}" if name else ""


def raised_by(waits_for: str) -> str:
    """Return how those go on that wait for this; nothing if it is not a budget."""
    shown, _, name = waits_for.partition(" of ")
    field = shown.replace(" ", "_")
    return f"{RAISE}{raising(name, field)}" if field in FIELDS.values() else ""


def budget_uses(limit: Limit, *texts: str | None) -> tuple[BudgetUse, ...]:
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


def use_of(
    name: str, limit: Limit | None, state: dict[str, Any], waiting: Mapping[str, int], now: float
) -> LimitUse:
    """Return the use of a limit from its stored state; `now` in milliseconds of Redis's clock."""
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


class LimitState(Record):
    """The state of one limit: `waiting` runs are in its line, for `waits_for`.

    Nobody calls under it for `cool_seconds` more. `in_flight` calls are under way, `refused` have
    got a 429 so far.
    """

    name: str
    waiting: int = 0
    waits_for: str = ""
    in_flight: int = 0
    cool_seconds: float = 0.0
    refused: int = 0

    def __str__(self) -> str:
        """Return in words who waits."""
        many = "1 run waits" if self.waiting == 1 else f"{self.waiting:,} runs wait"
        text = f"{many} for {self.waits_for or f'the limits of {self.name}'}"
        if self.cool_seconds:
            text += f"; no calls of {self.name} for {self.cool_seconds:g} s, after a 429"
        return text + raised_by(self.waits_for)


class LimitWait(Record):
    """A run's wait for limits: for `seconds` so far, and what for."""

    seconds: float
    waits_for: str

    def __str__(self) -> str:
        """Return it in words."""
        text = f"for {self.waits_for or 'limits of the fleet'}, {self.seconds:.1f} s so far"
        return text + raised_by(self.waits_for)


class LimitWaits(Record):
    """`runs` of those that were looked at wait for one limit, the longest for `seconds` so far."""

    waits_for: str
    runs: int
    seconds: float


class LimitStore(Gateway):
    """Reads and writes the limits of a fleet, what is used of them, and who waits for them."""

    def __init__(self, opened: Opened) -> None:
        super().__init__(opened)
        self._limits = opened.keys.of(keys.LIMIT_SETTINGS)
        self._state = opened.keys.of(keys.LIMIT_STATE)
        self._lines = opened.keys.of(keys.LIMIT_LINES)
        self._waiting = opened.keys.of(keys.LIMIT_WAITING)
        self._spent = opened.keys.of(keys.LIMIT_SPENT)
        self._reserved = opened.keys.of(keys.LIMIT_RESERVED)
        self._parsed: dict[str, tuple[str, Limit | None]] = {}

    async def version(self) -> str:
        """Return a version that every change of a limit changes; "" if none was ever set."""
        return await self._connection.execute("HGET", self._limits, VERSION) or ""

    async def read(self) -> tuple[str, dict[str, Limit]]:
        """Return the version and the limits. Raises `StoreError`, also for an invalid one."""
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
            limits[name] = found or NO_LIMIT
            self._parsed[name] = (text, found)
        return version, limits

    async def names(self) -> list[str]:
        """Return the names of all limits."""
        known = await self._connection.execute("HKEYS", self._limits)
        return sorted(name for name in known if name != VERSION)

    async def change(self, name: str, fields: Mapping[str, Any]) -> Limit:
        """Change fields of a limit, also while others change theirs; None takes one away.

        It holds for the next call. Raises `ConfigurationError` that names field and fix.
        """
        while True:
            text = await self._connection.execute("HGET", self._limits, name) or ""
            limit = changed(name, _readable(name, text), fields)
            if not limit.budgets:
                await self._forget([name])
            if await self._replace([(name, text, _stored(limit, **_marks(text)))]):
                return limit

    async def provide(self, limits: Mapping[str, Limit]) -> None:
        """Write limits of a configuration, but for names that somebody has set in Redis."""
        if not limits:
            return
        known = await self._connection.execute("HMGET", self._limits, *limits)
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
        at, page = await self._connection.execute("HSCAN", self._limits, at, "COUNT", 200)
        now = (await self._connection.now()).timestamp() * 1000
        found = {name: _marks(text).get(SUBMITTED, 0) for name, text in dict(page).items()}
        runs = [name for name, begun in found.items() if 0 < begun < now - SETTLED_MS]
        headers = (self._keys.run(name.partition(":")[2]) for name in runs)
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
            ("HDEL", self._limits, *names), ("HSET", self._limits, VERSION, round(now * 1e6))
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
        """Return the use of each limit, by name. Raises `StoreError` as `read` does."""
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

    async def under(self, names: Sequence[str]) -> dict[str, Limit]:
        """Return those of these limits that are set. Raises `StoreError`."""
        texts = await self._connection.execute("HMGET", self._limits, *names) if names else []
        found = zip(names, texts, strict=True)
        return {name: _readable(name, text) or NO_LIMIT for name, text in found if text}

    async def uses(self, known: Mapping[str, Limit], names: Sequence[str]) -> list[LimitUse]:
        """Return the use of these names, whose limits are `known`. Raises `StoreError`."""
        now = await self._now()
        spent = (self._spent, f"{self._spent}:{int(now // 86_400_000)}", self._reserved)
        hashes = (self._state, *spent)
        found = await self._connection.execute_all(*(("HMGET", key, *names) for key in hashes))
        uses = []
        for name, state, *texts in zip(names, *found, strict=True):
            limit = set_for(known, name) or known.get(f"{kind_of(name)}:*", NO_LIMIT)
            use = use_of(name, limit, state_of(state), {}, now)
            uses.append(use.model_copy(update={"budgets": budget_uses(limit, *texts)}))
        return uses

    async def tokens_per_call(self, names: Collection[str]) -> dict[str, dict[str, float]]:
        """Return what calls under way take of rates of tokens on average, by names and fields.

        Looks at a hundred of them; knows nothing of a name without any. Raises `StoreError`.
        """
        grants = self._keys.of(keys.LIMIT_GRANTS)
        flat = await self._connection.execute("HRANDFIELD", grants, MEASURED, "WITHVALUES")
        taken: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
        for held in map(state_of, flat[1::2]):
            amounts = held.get("amounts") or {}
            for name in taken.keys() & set(held.get("names") or ()):
                taken[name].append((amounts.get("i", 0), amounts.get("o", 0)))
        means = {}
        for name, some in taken.items():
            read = sum(one for one, _ in some) / max(len(some), 1)
            made = sum(one for _, one in some) / max(len(some), 1)
            fields = ("tokens_per_minute", "input_tokens_per_minute", "output_tokens_per_minute")
            means[name] = dict(zip(fields, (read + made, read, made), strict=True))
        return means

    async def lines(self, most: int = SHOWN) -> tuple[LimitState, ...]:
        """Return the lines in which most runs wait. Raises `StoreError`."""
        execute = self._connection.execute
        flat = await execute("ZREVRANGE", self._lines, 0, most - 1, "WITHSCORES")
        return await self._states(flat[::2], [int(float(one)) for one in flat[1::2]])

    async def some_waiting(self, most: int) -> dict[str, str]:
        """Return some of the runs that wait, with the limit that each waits for."""
        flat = await self._connection.execute("HRANDFIELD", self._waiting, most, "WITHVALUES")
        return _names(flat[::2], flat[1::2])

    async def waiting_for(self, run_ids: Sequence[str]) -> dict[str, str]:
        """Return those of these runs that wait, with the limit that each waits for."""
        execute = self._connection.execute
        places = await execute("HMGET", self._waiting, *run_ids) if run_ids else []
        return _names(run_ids, places)

    async def states(self, names: Sequence[str]) -> tuple[LimitState, ...]:
        """Return the state of these limits. Raises `StoreError`."""
        execute = self._connection.execute
        sizes = await execute("ZMSCORE", self._lines, *names) if names else []
        return await self._states(names, [int(float(one or 0)) for one in sizes])

    async def states_of_all(self, most: int = MEASURED) -> tuple[LimitState, ...]:
        """Return the state of the limits that are set, without those `*` stands for."""
        return await self.states((await self.names())[:most])

    async def wait_of(self, run_id: str) -> LimitWait | None:
        """Return for what a run waits; None where it does not. Raises `StoreError`."""
        place = await self._connection.execute("HGET", self._waiting, run_id)
        if not place:
            return None
        wait, why = _wait(place, await self._now())
        if why.endswith(" w"):  # so it was when the run came: its line may know better
            about = f" of {why[:-2]}"
            newer = [one.waits_for for one in await self.lines() if one.waits_for.endswith(about)]
            return wait.model_copy(update={"waits_for": newer[0]}) if newer else wait
        return wait

    async def waits_of(self, run_ids: Sequence[str]) -> tuple[LimitWaits, ...]:
        """Return for what some of these runs wait, the most frequent first. Raises `StoreError`."""
        execute = self._connection.execute
        places = await execute("HMGET", self._waiting, *run_ids) if run_ids else []
        if not any(places):
            return ()
        now = await self._now()
        waits: dict[str, list[float]] = {}
        for one in (_wait(place, now)[0] for place in places if place):
            waits.setdefault(one.waits_for, []).append(one.seconds)
        return tuple(
            LimitWaits(waits_for=name, runs=len(some), seconds=max(some))
            for name, some in sorted(waits.items(), key=lambda one: -len(one[1]))
        )

    async def _states(self, names: Sequence[str], sizes: Sequence[int]) -> tuple[LimitState, ...]:
        if not names:
            return ()
        stored = await self._connection.execute("HMGET", self._state, *names)
        now = await self._now()
        return tuple(
            _state(name, state_of(text), size, now)
            for name, text, size in zip(names, stored, sizes, strict=True)
        )

    async def _now(self) -> float:
        return (await self._connection.read_clock()).timestamp() * 1000

    async def _texts(self) -> tuple[str, dict[str, str]]:
        stored = dict(await self._connection.execute("HGETALL", self._limits))
        return stored.pop(VERSION, ""), stored

    async def _replace(self, changes: Iterable[tuple[str, str, str]]) -> int:
        """Write (name, text that was read, new text) where nobody was faster; return how many."""
        parts = [part for change in changes for part in change]
        if not parts:
            return 0
        return int(await run_script(self._connection, "replace", [self._limits], *parts))


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
        raise TypeError(f"limit {name!r} must be a table of fields")
    # A later release may know more fields; the script reads them all.
    fields = {field: stored[field] for field in Limit.model_fields if field in stored}
    says_something = fields.keys() - {"burst", "on_budget"}
    return limit_of(name, fields) if says_something else NO_LIMIT


def _readable(name: str, text: str) -> Limit | None:
    with suppress(ConfigurationError, ValueError, TypeError):
        return _read(name, text) if text else None
    return None


def _is_replaced(text: str) -> bool:
    with suppress(ValueError):
        stored = orjson.loads(text)
        return isinstance(stored, dict) and bool(stored.get(PROVIDED) or stored.get(LEARNED))
    return False


def _names(run_ids: Sequence[str], places: Sequence[str | None]) -> dict[str, str]:
    whys = ((place or "").split(" ", 2)[2:] for place in places)
    names = ("".join(why).rpartition(" ")[0] for why in whys)
    return {run: name for run, name in zip(run_ids, names, strict=True) if name}


def _wait(place: str, now: float) -> tuple[LimitWait, str]:
    """Return a wait, and why as it is stored."""
    _, since, why = [*place.split(" ", 2), "", ""][:3]
    seconds = max(round((now - float(since or 0)) / 1000, 1), 0.0)
    return LimitWait(seconds=seconds, waits_for=short_of(why)), why


def _state(name: str, state: dict[str, Any], size: int, now: float) -> LimitState:
    return LimitState(
        name=name,
        waiting=size,
        waits_for=short_of(state.get("why", "")) if size else "",
        in_flight=int(state.get("f", 0)),
        cool_seconds=max(round((state.get("cool", 0) - now) / 1000, 1), 0.0),
        refused=int(state.get("refused", 0)),
    )
