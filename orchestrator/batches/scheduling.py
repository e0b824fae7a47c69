"""The ticks of schedules, and their batches: one for each tick, whoever does it and how often.

The id of a batch is made of the schedule's name and the tick, so a worker that goes on where
another one died completes the same batch.
"""

import asyncio
import hashlib
import logging
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import ValidationError

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.batches.files.source import BatchInput
from stepfleet.orchestrator.batches.submit import BatchSubmission
from stepfleet.orchestrator.errors import (
    AgentException,
    ConfigurationError,
    SerializationError,
    StoreError,
)
from stepfleet.orchestrator.limits.limit import BATCH, NORMAL, own_limit
from stepfleet.orchestrator.records.batch import Manifest
from stepfleet.orchestrator.records.schedule import Schedule, ScheduleState, ScheduleView
from stepfleet.orchestrator.records.text.validation import duration, explain_invalid
from stepfleet.orchestrator.store.batches.batches import id_of_keyed_batch
from stepfleet.orchestrator.store.batches.schedules import TURN_MS
from stepfleet.orchestrator.store.runs.submission import Submission
from stepfleet.orchestrator.store.store import Store

log = logging.getLogger(__name__)

FIRST_RETRY, LONGEST_RETRY = 5.0, 3600.0
"""Seconds until a tick is tried again that could not be submitted; twice as many each time."""
PUT_OFF = timedelta(minutes=1)
"""When a schedule is looked at again that this worker cannot read."""
PAUSED_LOOK = timedelta(days=36_500)


def key_of(name: str, when: str) -> str:
    """Return the idempotency key of the batch of a tick, or of another time."""
    return f"schedule:{name}:{when}"


MOST_MADE_UP = 100
"""Ticks that are made up at the most."""
MOST_LOOKED_AT = 10_000
"""Ticks that are counted: of a longer gap only the end matters."""
IN_TIME = timedelta(seconds=60)
"""A tick that is submitted so much later was not missed."""
ALIASES = {
    "@yearly": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@hourly": "0 * * * *",
}
EVERY = "@every "
LEAST_EVERY, MOST_EVERY = 60, 366 * 86_400
"""Seconds between the ticks of `@every`."""
LONGEST_JITTER = 86_400.0
TICK, TICK_DATE = "{tick}", "{tick_date}"
"""Places in a schedule's lines: the tick's time, and its date, in the time zone of the schedule."""
_LOCAL = frozenset({"localtime", "posix", "posixrules", "right", "Factory"})
"""Zones that other machines may not have, or have otherwise."""
_TICK_FIELDS = 5


@dataclass(frozen=True, slots=True)
class Due:
    """The ticks to be submitted now, how many are left out, and when to look again.

    `last` is the newest tick that is handled when all that is done.
    """

    ticks: tuple[datetime, ...]
    left_out: int
    next_look: datetime
    last: datetime | None = None


def check_times(cron: str, tz: str, jitter: float, now: datetime) -> None:
    """Raise `ConfigurationError` that names the field where a schedule would never tick again."""
    for field, text in (("cron", cron), ("tz", tz)):
        if not isinstance(text, str):
            raise ConfigurationError(f"{field} is {ascii(text)[:70]}; write it as text")
    _zone(tz)
    if not isinstance(jitter, int | float) or not 0 <= jitter <= LONGEST_JITTER:
        msg = f"jitter is {jitter!r}; write seconds from 0 to {LONGEST_JITTER:.0f}"
        raise ConfigurationError(msg)
    if next(ticks_after(cron, tz, now), None) is None:
        raise _no_date(cron)


def ticks_after(cron: str, tz: str, after: datetime) -> Iterator[datetime]:
    """Yield the ticks later than `after`, in UTC and without jitter.

    Raises `ConfigurationError` for an invalid cron expression (of five fields) or time zone.
    """
    if cron.strip().startswith(EVERY):
        return _at_intervals(cron, after)
    from cronsim import CronSim, CronSimError  # noqa: PLC0415 - only where there are schedules

    fields = ALIASES.get(cron.strip(), cron).split()
    if fields and fields[0].startswith("@"):
        msg = f"cron {cron[:100]!r}: write one of {', '.join(ALIASES)}, or @every 15m"
        raise ConfigurationError(msg)
    start = after.astimezone(_zone(tz))
    try:
        if len(fields) != _TICK_FIELDS:
            raise CronSimError(f"it has {len(fields)} fields")  # noqa: TRY301 - as the library does
        found = CronSim(" ".join(fields), start)
    except CronSimError as error:
        with suppress(CronSimError):  # of any month it would be right
            CronSim(" ".join([*fields[:3], "*", *fields[4:]]), start)
            if "day-of-month" in str(error):
                raise _no_date(cron) from None
        msg = f"cron {cron[:100]!r}: {error}; write minute, hour, day, month and weekday: 0 6 * * *"
        raise ConfigurationError(msg) from None
    return (one.astimezone(UTC) for one in found)


def _no_date(cron: str) -> ConfigurationError:
    return ConfigurationError(f"cron {cron[:100]!r} has no date that exists; change day or month")


def due(schedule: Schedule, last: datetime | None, now: datetime) -> Due:
    """Return what of a schedule is to be submitted at `now`; `last` is the newest tick handled.

    A tick is due when its jitter is over. The newest due tick is not missed.
    """
    since = last or schedule.created
    passed: list[datetime] = []
    for number, tick in enumerate(ticks_after(schedule.cron, schedule.tz, since)):
        if at(schedule, tick) > now:
            return _policy(schedule, passed, now, at(schedule, tick))
        if number >= MOST_LOOKED_AT:  # the gap is long: what is before its end does not matter
            surely_due = now - timedelta(seconds=schedule.jitter)
            return due(schedule, _latest_before(schedule, surely_due), now)
        passed.append(tick)
    return _policy(schedule, passed, now, now + timedelta(days=365))


def at(schedule: Schedule, tick: datetime) -> datetime:
    """Return when a tick is submitted: by a part of the jitter later, always the same one."""
    if not schedule.jitter:
        return tick
    digest = hashlib.sha256(f"{schedule.name} {tick.isoformat()}".encode()).digest()
    share = int.from_bytes(digest[:4], "big") / 2**32
    return tick + timedelta(seconds=schedule.jitter * share)


def tick_id(tick: datetime) -> str:
    """Return a tick as text for ids: 20261123T060000Z."""
    return tick.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")


def placed(row: str, tick: datetime, tz: str) -> str:
    """Return a line (JSON) with the tick's time and date in its places."""
    if TICK not in row and TICK_DATE not in row:
        return row
    local = tick.astimezone(_zone(tz))
    return row.replace(TICK, local.isoformat()).replace(TICK_DATE, f"{local:%Y-%m-%d}")


def _at_intervals(cron: str, after: datetime) -> Iterator[datetime]:
    """Yield the ticks of `@every`: multiples of it since 1970, UTC."""
    every = duration(cron.strip().removeprefix(EVERY))
    if every is None or not LEAST_EVERY <= every <= MOST_EVERY:
        msg = f"cron {cron[:100]!r}: write a time from 1m to {MOST_EVERY // 86_400}d: @every 15m"
        raise ConfigurationError(msg)
    first = int(after.timestamp()) // every + 1
    return (datetime.fromtimestamp(one * every, UTC) for one in count(first))


def _policy(schedule: Schedule, passed: list[datetime], now: datetime, following: datetime) -> Due:
    if schedule.missed == "skip":
        kept = [one for one in passed[-1:] if at(schedule, one) >= now - IN_TIME]
    else:
        kept = passed[-MOST_MADE_UP if schedule.missed == "all" else -1 :]
    last = passed[-1] if passed else None
    return Due(tuple(kept), len(passed) - len(kept), following, last)


def _latest_before(schedule: Schedule, until: datetime) -> datetime:
    """Return the tick with as many after it up to `until` as are made up at most.

    Going back twice as far each time finds it.
    """
    back = timedelta(minutes=MOST_MADE_UP)
    while True:
        ticks = ticks_until(ticks_after(schedule.cron, schedule.tz, until - back), until)
        newest = deque(ticks, maxlen=MOST_MADE_UP + 1)
        if len(newest) > MOST_MADE_UP:
            return newest[0]
        back *= 2


def ticks_until(ticks: Iterator[datetime], until: datetime) -> Iterator[datetime]:
    """Yield the ticks up to a time."""
    for tick in ticks:
        if tick > until:
            return
        yield tick


def _zone(tz: str) -> ZoneInfo:
    try:
        if tz.split("/", maxsplit=1)[0] not in _LOCAL:
            return ZoneInfo(tz)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        pass
    msg = f"tz {tz[:100]!r} is not a time zone; write a name such as Europe/Berlin, or UTC"
    raise ConfigurationError(msg)


class Scheduling:
    """Looks after schedules."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._schedules = store.schedules
        self._batches = store.batches
        self._submission = BatchSubmission(store)

    async def look(self, name: str) -> None:
        """Submit what is due of a schedule; twice does no harm.

        Raises `StoreError` when Redis stays out of reach; any worker then goes on.
        """
        if not await self._schedules.take(name):
            return
        keeps = asyncio.create_task(self._hold(name))
        try:
            if await self._schedules.is_there(name):
                await self._advance(await self._schedules.get(name))
            else:
                await self._schedules.forget(name)
        except (ConfigurationError, SerializationError) as error:  # of another version, perhaps
            log.warning("schedule %r is put off: %s", name, error)
            await self._schedules.look_at(name, await self._schedules.now() + PUT_OFF)
        finally:
            keeps.cancel()
            await self._schedules.release(name)

    async def submit(self, schedule: Schedule, tick: datetime, when: str = "") -> Manifest:
        """Submit the batch of a schedule for a tick, or for that time under a name of its own."""
        when = when or tick_id(tick)
        try:
            config = AgentConfig.from_json(await self._schedules.agent(schedule.name))
        except ValidationError as error:
            msg = f"its agent's configuration cannot be read: {explain_invalid(error)}"
            raise ConfigurationError(msg) from None
        await self._store.configs.save(config)  # no run has referred to it for a long time
        rows = await self._schedules.rows(schedule)
        if len(rows) != schedule.rows:
            msg = f"{len(rows)} of its {schedule.rows} lines are left; add it again"
            raise ConfigurationError(msg)
        source = await asyncio.to_thread(_source, schedule, rows, tick)
        given = Submission(
            source,
            config.name,
            agents={config.name: config},
            overrides=schedule.overrides,
            idempotency_key=key_of(schedule.name, when),
            limit=own_limit(BATCH, schedule.limit),
            priority=NORMAL if schedule.priority is None else schedule.priority,
            name=f"{schedule.name} {when}",
            input_field=schedule.input_field,
            id_field=schedule.id_field,
            tenant=schedule.tenant,
        )
        return (await self._submission.submit(given, _accept)).manifest

    async def _advance(self, view: ScheduleView) -> None:
        schedule, state, now = view.schedule, view.state, await self._schedules.now()
        if state.begun:  # its owner has died: also where it would be left out by now
            state, problem = await self._tick(schedule, state, state.begun)
            look = now + _delay(state) if problem else now
            if not await self._schedules.note(schedule, state, look) or problem:
                return
        if schedule.paused:
            await self._schedules.look_at(schedule.name, now + PAUSED_LOOK)
            return
        found = await asyncio.to_thread(due, schedule, state.last_tick, now)
        state = state.model_copy(update={"skipped": state.skipped + found.left_out})
        for tick in found.ticks:
            state, problem = await self._tick(schedule, state, tick)
            if problem:
                look = min(now + _delay(state), found.next_look)
                await self._schedules.note(schedule, state, look)
                return
            if not await self._schedules.note(schedule, state, found.next_look):
                return
        if found.left_out:
            log.info("schedule %r: %d ticks were left out", schedule.name, found.left_out)
        if found.last and not found.ticks:
            state = state.model_copy(update={"last_tick": found.last})
        await self._schedules.note(schedule, state, found.next_look)

    async def _tick(
        self, schedule: Schedule, state: ScheduleState, tick: datetime
    ) -> tuple[ScheduleState, str]:
        """Return the state after a tick, and why it could not be submitted, or ''."""
        newest = max(tick, state.last_tick or tick)  # a resume may have passed it over
        done: dict[str, Any] = {"last_tick": newest, "begun": None, "error": None, "tries": 0}
        batch_id = id_of_keyed_batch(key_of(schedule.name, tick_id(tick)))
        is_new = state.begun != tick
        if is_new and schedule.overlap == "skip" and await self._is_open(state.batch_id, batch_id):
            log.info("schedule %r: the tick of %s is left out", schedule.name, tick)
            return state.model_copy(update={**done, "skipped": state.skipped + 1}), ""
        if is_new:
            state = state.model_copy(update={"begun": tick})
            if not await self._schedules.note(schedule, state, await self._schedules.now()):
                return state, "its turn is another worker's"
        try:
            await self.submit(schedule, tick)
        except StoreError:
            raise
        except (AgentException, OSError) as error:
            why = error.message if isinstance(error, AgentException) else str(error)
            if state.error != why:
                log.warning("schedule %r could not be submitted: %s", schedule.name, why)
            failed: dict[str, Any] = {"error": why[:1000], "tries": state.tries + 1}
            if await self._batches.find(batch_id) is None:
                # It comes again, unless a newer one takes its place; those before are counted.
                before = tick - timedelta(seconds=1)
                failed |= {"begun": None, "last_tick": max(before, state.last_tick or before)}
            return state.model_copy(update=failed), why
        log.info("schedule %r: the tick of %s is batch %s", schedule.name, tick, batch_id)
        submitted = {
            "submitted": state.submitted + 1,
            "batch_id": batch_id,
            "submitted_tick": tick,
        }
        return state.model_copy(update={**done, **submitted}), ""

    async def _is_open(self, before: str | None, batch_id: str) -> bool:
        if before is None or before == batch_id:
            return False
        manifest = await self._batches.find(before)
        return manifest is not None and (await self._batches.progress(manifest)).open > 0

    async def _hold(self, name: str) -> None:
        while True:
            await asyncio.sleep(TURN_MS / 3000)
            with suppress(AgentException):
                if not await self._schedules.hold(name):
                    log.warning("schedule %r is looked after by another worker now", name)
                    return


def _delay(state: ScheduleState) -> timedelta:
    """Return when a tick is tried again that could not be submitted."""
    return timedelta(seconds=min(FIRST_RETRY * 2 ** min(state.tries, 20), LONGEST_RETRY))


def _source(schedule: Schedule, rows: Sequence[str], tick: datetime) -> BatchInput:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the input closes it
    file.writelines(placed(row, tick, schedule.tz).encode() + b"\n" for row in rows)
    file.flush()
    source = BatchInput(file, f"schedule {schedule.name}")
    source.is_table = schedule.is_table
    return source


async def _accept(_: Sequence[AgentConfig]) -> None:
    """Accept every agent: its workers may start later."""
