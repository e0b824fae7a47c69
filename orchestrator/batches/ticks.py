"""When a schedule ticks, and what its lines say of that. Pure: times come in, times go out.

Cron as Debian's cron reads it: where clocks are set forward, a tick of the hour that does not exist
comes right after it; where they are set back, one of the doubled hour comes once. Those of every
hour or minute come by real time.
"""

import hashlib
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.schedule import Schedule
from stepfleet.orchestrator.records.text.durations import duration

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
_FIELDS = 5


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

    Raises `ConfigurationError` for what is no cron expression of five fields, or no time zone.
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
        if len(fields) != _FIELDS:
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

    A tick is due when its jitter is over. The newest due tick is no missed one.
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
    """Return the tick with as many behind it up to `until` as are made up at the most.

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
    msg = f"tz {tz[:100]!r} is no time zone; write a name as Europe/Berlin, or UTC"
    raise ConfigurationError(msg)
