"""Adds and prints schedules."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.batches.following import at, ticks_after
from stepfleet.orchestrator.cli.setup.with_fleet import show
from stepfleet.orchestrator.cli.terminal.format import WIDE, count, seconds, shown
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.limits.limit import PRIORITIES
from stepfleet.orchestrator.records.schedule import ScheduleView

MOST_SHOWN = 2
"""Ticks after the next one."""


def add(
    name: str,
    file: str,
    named: tuple[str | None, str | None],
    options: dict[str, Any],
    data: Path,
    *,
    json: bool,
) -> None:
    """Add a schedule and print it; `named` are the agents' module and the agent."""
    agent = _agent(*named)
    show(
        data,
        lambda fleet: fleet.schedules.add(name, file, agent, **options),
        next_words,
        json=json,
    )


def next_words(view: ScheduleView) -> str:
    """Return when a schedule ticks next."""
    schedule = view.schedule
    lines = "1 line" if schedule.rows == 1 else f"{count(schedule.rows)} lines"
    when = f"next {_local(view, view.next_tick)}" if view.next_tick else "paused"
    return f"{schedule.name}: {lines} for agent {schedule.agent}, {when}"


@dataclass(frozen=True, slots=True)
class Judged:
    """A schedule, and what is wrong with it at this moment."""

    view: ScheduleView
    trouble: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return both as JSON-ready data."""
        return {**self.view.to_dict(), "trouble": self.trouble}


async def read(name: str, fleet: AsyncFleet) -> Judged:
    """Return a schedule, judged."""
    (found,) = await _judged([await fleet.schedules.get(name)], fleet)
    return found


async def read_all(fleet: AsyncFleet) -> list[Judged]:
    """Return all schedules, judged."""
    return await _judged(await fleet.schedules.all(), fleet)


async def _judged(views: Sequence[ScheduleView], fleet: AsyncFleet) -> list[Judged]:
    troubles = await fleet.schedules.troubles(views)
    return [Judged(one, troubles.get(one.schedule.name, "")) for one in views]


def table(found: Sequence[Judged]) -> RenderableType:
    """Return all schedules, a row each."""
    if not found:
        return "There are no schedules. Add one by: stepfleet schedule add NAME FILE --cron ..."
    return _Listed(found)


@dataclass(frozen=True, slots=True)
class _Listed:
    """A row for each schedule; on a narrow terminal the facts of each, a line for each fact."""

    found: Sequence[Judged]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from [_rows(self.found)] if options.max_width >= WIDE else map(picture, self.found)


def _rows(judged: Sequence[Judged]) -> Table:
    found = Table()
    for heading in (
        "name",
        "cron",
        "agent",
        "lines",
        "next",
        "last",
        "submitted",
        "left out",
        "trouble",
    ):
        found.add_column(heading, overflow="fold")
    for one in judged:
        view, schedule, state = one.view, one.view.schedule, one.view.state
        found.add_row(
            schedule.name,
            f"{schedule.cron} {schedule.tz}",
            shown(schedule.agent, 60),
            count(schedule.rows),
            _local(view, view.next_tick) or "paused",
            _local(view, state.submitted_tick),
            count(state.submitted),
            count(state.skipped),
            Text(shown(one.trouble, 200), style="red"),
        )
    return found


def picture(judged: Judged) -> RenderableType:
    """Return one schedule, a line for each of its facts."""
    view, schedule, state = judged.view, judged.view.schedule, judged.view.state
    found = Table.grid(padding=(0, 2))
    for label, value in (
        ("schedule", schedule.name),
        ("cron", f"{schedule.cron} {schedule.tz}"),
        ("agent", schedule.agent),
        ("lines", count(schedule.rows)),
        ("jitter", seconds(schedule.jitter) if schedule.jitter else ""),
        ("missed ticks", schedule.missed),
        ("overlap", schedule.overlap),
        ("tenant", schedule.tenant or ""),
        ("priority", PRIORITIES[schedule.priority] if schedule.priority is not None else ""),
        ("limit", ", ".join(f"{name}={value}" for name, value in (schedule.limit or {}).items())),
        ("next", _local(view, view.next_tick) or "paused"),
        ("then", ", ".join(_local(view, one) for one in _then(view))),
        ("last", _local(view, state.submitted_tick)),
        ("last batch", state.batch_id or ""),
        ("last run-now", view.run_now or ""),
        ("submitted", count(state.submitted)),
        ("left out", count(state.skipped)),
        ("trouble", shown(judged.trouble)),
    ):
        if value:
            found.add_row(Text(label, style="bold"), Text(value))
    return found


def _local(view: ScheduleView, time: datetime | None) -> str:
    """Return a time in the schedule's own time zone, or ''."""
    if time is None:
        return ""
    zone = ZoneInfo(view.schedule.tz)
    return f"{time.astimezone(zone):%Y-%m-%d %H:%M:%S} {view.schedule.tz}"


def _then(view: ScheduleView) -> list[datetime]:
    """Return when the ticks after the next one come."""
    schedule, following = view.schedule, view.next_tick
    if following is None:
        return []
    ticks = ticks_after(schedule.cron, schedule.tz, following - timedelta(seconds=schedule.jitter))
    times = (at(schedule, one) for one in ticks)
    # Redis keeps the next one in milliseconds.
    later = following + timedelta(milliseconds=1)
    return list(islice((one for one in times if one > later), MOST_SHOWN))


def _agent(reference: str | None, name: str | None) -> Agent | str:
    if reference is None:
        if name is None:
            raise ConfigurationError("name the agent: --agent NAME, or --agents MODULE")
        return name
    agents = load_agents(reference)
    if name is None and len(agents) == 1:
        return next(iter(agents.values()))
    if name not in agents:
        known = ", ".join(sorted(agents)) or "none"
        raise ConfigurationError(f"--agent {name or ''}: {reference} has: {known}")
    return agents[name]
