"""Schedules in Redis: what they are, their lines, when each is to be looked at, and who does.

All keys are in one slot. A worker that looks at a schedule has its turn for a few seconds and
renews it; another one goes on where it died, and makes the same batches.
"""

import logging
from collections.abc import Sequence
from datetime import datetime

import orjson
from pydantic import ValidationError

from stepfleet.orchestrator.errors import ConfigurationError, NotFoundError, SerializationError
from stepfleet.orchestrator.records.schedule import Schedule, ScheduleState, ScheduleView
from stepfleet.orchestrator.records.text.validation import explain_invalid
from stepfleet.orchestrator.store.codec import milliseconds, moment
from stepfleet.orchestrator.store.gateway import Opened, TurnGateway
from stepfleet.orchestrator.store.keys import (
    SCHEDULE_AGENTS,
    SCHEDULE_ROWS,
    SCHEDULE_STATES,
    SCHEDULE_TICKS,
    SCHEDULE_TURNS,
    SCHEDULES,
)
from stepfleet.orchestrator.store.lua import run_script

log = logging.getLogger(__name__)

TURN_MS = 10_000
"""How long a worker that is silent keeps others from a schedule."""
MOST_AT_ONCE = 20
MOST = 1_000
"""Schedules of a fleet."""
RUN_NOW = " now"
"""After a name, among the states: the id of the newest batch outside its ticks."""
ROWS_SECONDS = 3600
"""How long lines stay that belong to no schedule (yet)."""


class Schedules(TurnGateway):
    """Reads and writes schedules."""

    def __init__(self, opened: Opened) -> None:
        turns = opened.keys.of(SCHEDULE_TURNS)
        super().__init__(opened, TURN_MS, lambda name: turns + name)
        self._all, self._states, self._ticks = map(
            opened.keys.of, (SCHEDULES, SCHEDULE_STATES, SCHEDULE_TICKS)
        )
        self._agents, self._rows = opened.keys.of(SCHEDULE_AGENTS), opened.keys.of(SCHEDULE_ROWS)

    async def now(self) -> datetime:
        """Return Redis's time."""
        return await self._connection.now()

    async def add(
        self, schedule: Schedule, agent: str, rows: Sequence[bytes], first: datetime
    ) -> None:
        """Store a new schedule; `agent` is its agent's configuration (JSON).

        Raises `ConfigurationError` where its name is taken. The lines come first, and expire where
        their caller dies after them.
        """
        execute, name = self._connection.execute, schedule.name
        if int(await execute("HLEN", self._all)) >= MOST:
            raise ConfigurationError(f"there are {MOST:,} schedules; remove some")
        if await execute("HEXISTS", self._all, name):
            raise _is_there(name)
        key = self._rows + schedule.rows_key
        for at in range(0, len(rows), 1000):
            page = rows[at : at + 1000]
            if int(await execute("RPUSH", key, *page)) > at + len(page):  # twice: a reply was lost
                await execute("LTRIM", key, 0, at + len(page) - 1)
            await execute("EXPIRE", key, ROWS_SECONDS)
        keys = (self._all, self._states, self._ticks, self._agents, key)
        given = (name, schedule.to_json(), agent, milliseconds(first))
        if not await run_script(self._connection, "add_schedule", keys, *given):
            await execute("DEL", key)
            raise _is_there(name)

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
        views = (
            _read(n, found[n], known.get(n), times.get(n), known.get(n + RUN_NOW))
            for n in sorted(found)
        )
        return [one for one in views if one is not None]

    async def get(self, name: str) -> ScheduleView:
        """Return a schedule. Raises `ConfigurationError` where there is none of that name."""
        schedule, state, tick, run_now = await self._connection.execute_all(
            ("HGET", self._all, name),
            ("HGET", self._states, name),
            ("ZSCORE", self._ticks, name),
            ("HGET", self._states, name + RUN_NOW),
        )
        if schedule is None:
            names = sorted(await self._connection.execute("HKEYS", self._all))
            known = ", ".join(names[:20]) or "none"
            raise NotFoundError(f"there is no schedule {name!r}; there are: {known}")
        try:
            return _view(schedule, state, tick, run_now)
        except ValidationError as error:
            msg = f"schedule {name!r} cannot be read by this version: {explain_invalid(error)}"
            raise SerializationError(msg) from None

    async def rows(self, schedule: Schedule) -> list[str]:
        """Return the lines of a schedule's batches, as JSON."""
        return list(await self._connection.execute("LRANGE", self._rows + schedule.rows_key, 0, -1))

    async def agent(self, name: str) -> str:
        """Return the configuration (JSON) of a schedule's agent."""
        return str(await self._connection.execute("HGET", self._agents, name))

    async def is_there(self, name: str) -> bool:
        """Return whether there is a schedule of that name, readable or not."""
        return bool(await self._connection.execute("HEXISTS", self._all, name))

    async def change(self, schedule: Schedule, look: datetime) -> None:
        """Store a schedule that is there, and when to look at it."""
        await self._write(schedule.name, schedule.rows_key, schedule=schedule, look=look)

    async def remove(self, name: str) -> None:
        """Remove a schedule; its batches stay."""
        stored = ""
        while not await self._remove(name, stored):  # a worker may change it after it was read
            stored = await self._connection.execute("HGET", self._all, name) or ""

    async def forget(self, name: str) -> None:
        """Remove what is left of a schedule, if none is there."""
        await self._remove(name, "")

    async def _remove(self, name: str, stored: str) -> bool:
        place = orjson.loads(stored).get("rows_key", "") if stored else ""
        own = (self._rows + place, self._key_of_turn(name))
        keys = (self._all, self._states, self._ticks, self._agents, *own)
        return bool(await run_script(self._connection, "remove_schedule", keys, name, stored))

    async def due(self) -> tuple[list[str], float | None]:
        """Return schedules to be looked at now, and in how many seconds the next one is."""
        now = milliseconds(await self.now())
        found = await self._connection.execute("ZRANGE", self._ticks, 0, MOST_AT_ONCE, "WITHSCORES")
        times = _pairs(found)
        ready = [name for name, score in times if float(score) <= now]
        later = [float(score) for _, score in times if float(score) > now]
        return ready, (min(later) - now) / 1000 if later else None

    async def note(self, schedule: Schedule, state: ScheduleState, look: datetime) -> bool:
        """Store what came of a schedule's ticks, and when to look again, as the turn's owner.

        Returns false where the turn is another's by now, or the schedule has been removed.
        """
        return await self._write(
            schedule.name, schedule.rows_key, state=state, look=look, is_owner=True
        )

    async def go_on(self, schedule: Schedule, state: ScheduleState, look: datetime) -> None:
        """Store a schedule and its state for a client, whosever turn it is."""
        place = schedule.name, schedule.rows_key
        await self._write(*place, schedule=schedule, state=state, look=look)

    async def note_run_now(self, name: str, batch_id: str) -> None:
        """Store which batch was submitted outside a schedule's ticks, if that exists."""
        if await self.is_there(name):
            await self._connection.execute("HSET", self._states, name + RUN_NOW, batch_id)

    async def look_at(self, name: str, when: datetime) -> None:
        """Have workers look at a schedule then, if it is there, as the one whose turn it is."""
        await self._write(name, "", look=when, is_owner=True)

    async def _write(
        self,
        name: str,
        rows_key: str,
        *,
        schedule: Schedule | None = None,
        state: ScheduleState | None = None,
        look: datetime,
        is_owner: bool = False,
    ) -> bool:
        keys = (self._all, self._states, self._ticks, self._key_of_turn(name))
        texts = (one.to_json() if one else "" for one in (schedule, state))
        token = self._token if is_owner else ""
        given = (name, *texts, milliseconds(look), token, rows_key)
        return bool(await run_script(self._connection, "schedule", keys, *given))


def _is_there(name: str) -> ConfigurationError:
    return ConfigurationError(f"schedule {name!r} exists already; remove it first, or rename this")


def _read(
    name: str, schedule: str, state: str | None, tick: str | None, run_now: str | None
) -> ScheduleView | None:
    try:
        return _view(schedule, state, tick, run_now)
    except ValidationError as error:
        log.warning("schedule %r cannot be read: %s", name, explain_invalid(error))
        return None


def _pairs(reply: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(reply[::2], reply[1::2], strict=True))


def _view(schedule: str, state: str | None, tick: str | None, run_now: str | None) -> ScheduleView:
    known = Schedule.from_json(schedule)
    return ScheduleView(
        schedule=known,
        state=ScheduleState.from_json(state) if state else ScheduleState(),
        next_tick=None if known.paused or tick is None else moment(f"{float(tick):.0f}"),
        run_now=run_now,
    )
