"""Schedules in Redis: what they are, their lines, when each is to be looked at, and who does.

All keys are in one slot. A worker that looks at a schedule has its turn for a few seconds and
renews it; another one goes on where it died, and makes the same batches.
"""

from collections.abc import Sequence
from datetime import datetime

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.schedule import Schedule, ScheduleState, ScheduleView
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store.keys import (
    SCHEDULE_ROWS,
    SCHEDULE_STATES,
    SCHEDULE_TICKS,
    SCHEDULE_TURNS,
    SCHEDULES,
    Keys,
)
from stepfleet.orchestrator.store.records.codec import milliseconds, moment

TURN_MS = 10_000
"""How long a worker that is silent keeps others from a schedule."""
MOST_AT_ONCE = 20
MOST = 1_000
"""Schedules of a fleet."""


class Schedules:
    """Reads and writes schedules."""

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self._connection = connection
        self._all, self._states, self._ticks = map(
            keys.of, (SCHEDULES, SCHEDULE_STATES, SCHEDULE_TICKS)
        )
        self._rows, self._turns = keys.of(SCHEDULE_ROWS), keys.of(SCHEDULE_TURNS)

    async def now(self) -> datetime:
        """Return Redis's time."""
        return await self._connection.now()

    async def add(self, schedule: Schedule, rows: Sequence[bytes], first: datetime) -> None:
        """Store a new schedule. Raises `ConfigurationError` where its name is taken."""
        execute, name = self._connection.execute, schedule.name
        if int(await execute("HLEN", self._all)) >= MOST:
            raise ConfigurationError(f"there are {MOST:,} schedules; remove some")
        if await execute("HEXISTS", self._all, name):
            raise ConfigurationError(f"schedule {name!r} is there; remove it first, or rename this")
        await execute("DEL", self._rows + name)
        for at in range(0, len(rows), 1000):
            await execute("RPUSH", self._rows + name, *rows[at : at + 1000])
        await execute("HDEL", self._states, name)
        if not await execute("HSETNX", self._all, name, schedule.to_json()):
            raise ConfigurationError(f"schedule {name!r} is there; remove it first, or rename this")
        await execute("ZADD", self._ticks, milliseconds(first), name)

    async def all(self) -> list[ScheduleView]:
        """Return all schedules by their names."""
        schedules, states, ticks = await self._connection.execute_all(
            ("HGETALL", self._all),
            ("HGETALL", self._states),
            ("ZRANGE", self._ticks, 0, -1, "WITHSCORES"),
        )
        found = dict(schedules if isinstance(schedules, dict) else _pairs(schedules))
        known = dict(states if isinstance(states, dict) else _pairs(states))
        times = dict(_pairs(ticks))
        return [_view(found[n], known.get(n), times.get(n)) for n in sorted(found)]

    async def get(self, name: str) -> ScheduleView:
        """Return a schedule. Raises `ConfigurationError` where there is none of that name."""
        schedule, state, tick = await self._connection.execute_all(
            ("HGET", self._all, name),
            ("HGET", self._states, name),
            ("ZSCORE", self._ticks, name),
        )
        if schedule is None:
            names = sorted(await self._connection.execute("HKEYS", self._all))
            known = ", ".join(names[:20]) or "none"
            raise ConfigurationError(f"there is no schedule {name!r}; there are: {known}")
        return _view(schedule, state, tick)

    async def rows(self, name: str) -> list[str]:
        """Return the lines of a schedule's batches, as JSON."""
        return list(await self._connection.execute("LRANGE", self._rows + name, 0, -1))

    async def change(self, schedule: Schedule, look: datetime) -> None:
        """Store a schedule that is there, and when to look at it."""
        await self._connection.execute("HSET", self._all, schedule.name, schedule.to_json())
        await self.look_at(schedule.name, look)

    async def remove(self, name: str) -> None:
        """Remove a schedule; its batches stay."""
        for command in (
            ("ZREM", self._ticks, name),
            ("HDEL", self._all, name),
            ("HDEL", self._states, name),
            ("DEL", self._rows + name),
        ):
            await self._connection.execute(*command)

    async def due(self) -> tuple[list[str], float | None]:
        """Return schedules to be looked at now, and in how many seconds the next one is."""
        now = milliseconds(await self.now())
        found = await self._connection.execute("ZRANGE", self._ticks, 0, MOST_AT_ONCE, "WITHSCORES")
        times = _pairs(found)
        ready = [name for name, score in times if float(score) <= now]
        later = [float(score) for _, score in times if float(score) > now]
        return ready, (min(later) - now) / 1000 if later else None

    async def take(self, name: str) -> bool:
        """Return whether it is the caller's to look at."""
        turn = ("SET", self._turns + name, "1", "NX", "PX", TURN_MS)
        return bool(await self._connection.execute(*turn))

    async def hold(self, name: str) -> None:
        """Keep the turn for a few seconds more."""
        await self._connection.execute("PEXPIRE", self._turns + name, TURN_MS)

    async def release(self, name: str) -> None:
        """Give the turn back."""
        await self._connection.execute("DEL", self._turns + name)

    async def note(self, name: str, state: ScheduleState, look: datetime) -> None:
        """Store what came of a schedule's ticks, and when to look again."""
        if await self._connection.execute("HEXISTS", self._all, name):
            await self._connection.execute("HSET", self._states, name, state.to_json())
            await self.look_at(name, look)

    async def look_at(self, name: str, when: datetime) -> None:
        """Have workers look at a schedule then, if it is there."""
        await self._connection.execute("ZADD", self._ticks, "XX", milliseconds(when), name)


def _pairs(reply: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(reply[::2], reply[1::2], strict=True))


def _view(schedule: str, state: str | None, tick: str | None) -> ScheduleView:
    known = Schedule.from_json(schedule)
    return ScheduleView(
        schedule=known,
        state=ScheduleState.from_json(state) if state else ScheduleState(),
        next_tick=None if known.paused or tick is None else moment(f"{float(tick):.0f}"),
    )
