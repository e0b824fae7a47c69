"""What people see of limits: who waits for which, and since when. Changes nothing.

Reads a bounded number of names: with a limit for each tenant or batch there may be many.
"""

from collections.abc import Sequence
from typing import Any

from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.admission.limit_settings import LimitSettings
from stepfleet.orchestrator.store.admission.limit_use import raised_by, short_of, state_of
from stepfleet.orchestrator.store.keys import Keys

SHOWN = 5
"""Lines that an overview has: the longest."""
MEASURED = 100
"""Limits that metrics have."""


class LimitState(Record):
    """What happens under one limit: `waiting` runs are in its line, for `waits_for`.

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


class LimitLines:
    """Reads the lines of a fleet."""

    def __init__(self, connection: Connection, found: Keys) -> None:
        self._connection = connection
        self._limits = LimitSettings(connection, found)
        self._state = found.of(keys.LIMIT_STATE)
        self._lines = found.of(keys.LIMIT_LINES)
        self._waiting = found.of(keys.LIMIT_WAITING)

    async def longest(self, most: int = SHOWN) -> tuple[LimitState, ...]:
        """Return the lines in which most runs wait. Raises `StoreError`."""
        execute = self._connection.execute
        flat = await execute("ZREVRANGE", self._lines, 0, most - 1, "WITHSCORES")
        return await self._states(flat[::2], [int(float(one)) for one in flat[1::2]])

    async def some(self, most: int) -> dict[str, str]:
        """Return some of the runs that wait, with the limit that each waits for."""
        flat = await self._connection.execute("HRANDFIELD", self._waiting, most, "WITHVALUES")
        return _names(flat[::2], flat[1::2])

    async def of(self, run_ids: Sequence[str]) -> dict[str, str]:
        """Return those of these runs that wait, with the limit that each waits for."""
        execute = self._connection.execute
        places = await execute("HMGET", self._waiting, *run_ids) if run_ids else []
        return _names(run_ids, places)

    async def named(self, names: Sequence[str]) -> tuple[LimitState, ...]:
        """Return what happens under these limits. Raises `StoreError`."""
        execute = self._connection.execute
        sizes = await execute("ZMSCORE", self._lines, *names) if names else []
        return await self._states(names, [int(float(one or 0)) for one in sizes])

    async def configured(self, most: int = MEASURED) -> tuple[LimitState, ...]:
        """Return what happens under the limits that are set, without those `*` stands for."""
        return await self.named((await self._limits.names())[:most])

    async def wait_of(self, run_id: str) -> LimitWait | None:
        """Return for what a run waits; None where it does not. Raises `StoreError`."""
        place = await self._connection.execute("HGET", self._waiting, run_id)
        if not place:
            return None
        wait, why = _wait(place, await self._now())
        if why.endswith(" w"):  # so it was when the run came: its line may know better
            about = f" of {why[:-2]}"
            newer = [one.waits_for for one in await self.longest() if one.waits_for.endswith(about)]
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
