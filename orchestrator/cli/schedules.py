"""`stepfleet schedule`: batches that are submitted again and again."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from functools import partial
from itertools import islice
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo

import typer
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from stepfleet.orchestrator.batches.scheduling import at, ticks_after
from stepfleet.orchestrator.cli import options
from stepfleet.orchestrator.cli.fleet import print_found, with_fleet
from stepfleet.orchestrator.cli.inputs import LineOptions, agent_of, seconds_of
from stepfleet.orchestrator.cli.terminal import WIDE, count, print_text, seconds, shown
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.limits.limit import PRIORITIES
from stepfleet.orchestrator.records.schedule import ScheduleView

Name = Annotated[str, typer.Argument(metavar="NAME", help="The schedule.")]


schedule = typer.Typer(no_args_is_help=True, help="Batches that are submitted again and again.")


@schedule.command("add")
@options.with_records
def schedule_add(
    name: Name,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="The lines of each batch; - is stdin.")
    ],
    *,
    cron: Annotated[
        str,
        typer.Option("--cron", help="'0 6 * * 1-5', @daily, or '@every 15m'."),
    ],
    tz: Annotated[str, typer.Option("--tz", help="Time zone, such as Europe/Berlin.")] = "UTC",
    agents: options.MaybeAgentsRef = None,
    agent: options.AgentName = None,
    jitter: Annotated[
        str, typer.Option("--jitter", help="Delays each tick by up to this much, such as 5m.")
    ] = "0s",
    missed: Annotated[
        Literal["newest", "all", "skip"],
        typer.Option("--missed", help="Ticks to make up that came while no worker was up."),
    ] = "newest",
    overlap: Annotated[
        Literal["allow", "skip"],
        typer.Option("--overlap", help="A tick while the batch before it is open."),
    ] = "allow",
    paused: Annotated[bool, typer.Option("--paused", help="Add it, and let it rest.")] = False,
    lines: LineOptions,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Submit a file as a batch again and again; its lines are stored with the schedule."""
    chosen: Any = {"cron": cron, "tz": tz, "jitter": seconds_of(jitter, "--jitter")}
    chosen |= {"missed": missed, "overlap": overlap, "paused": paused, **asdict(lines)}
    by = agent_of(agents, agent)
    print_found(
        data, lambda fleet: fleet.schedules.add(name, file, by, **chosen), next_words, json=json
    )


@schedule.command("list")
def schedule_list(json: options.Json = False, data: options.Data = options.DATA_FOLDER) -> None:
    """List the schedules with their last and next ticks."""
    print_found(
        data,
        read_all,
        table,
        json=json,
        as_data=lambda found: [one.to_dict() for one in found],
    )


@schedule.command("show")
def schedule_show(
    name: Name, json: options.Json = False, data: options.Data = options.DATA_FOLDER
) -> None:
    """Show a schedule: what it submits, when, and what came of it."""
    print_found(data, partial(read, name), schedule_picture, json=json)


@schedule.command("pause")
def schedule_pause(
    name: Name, json: options.Json = False, data: options.Data = options.DATA_FOLDER
) -> None:
    """Let a schedule rest; its ticks are left out."""
    text = f"{name}: paused"
    print_found(data, lambda fleet: fleet.schedules.pause(name), lambda _: text, json=json)


@schedule.command("resume")
def schedule_resume(
    name: Name, json: options.Json = False, data: options.Data = options.DATA_FOLDER
) -> None:
    """Resume a paused schedule with its next tick."""
    print_found(data, lambda fleet: fleet.schedules.resume(name), next_words, json=json)


@schedule.command("remove")
def schedule_remove(name: Name, data: options.Data = options.DATA_FOLDER) -> None:
    """Remove a schedule; its batches stay."""
    with_fleet(data, lambda fleet: fleet.schedules.remove(name))
    print_text(f"{name}: removed")


@schedule.command("run-now")
def schedule_run_now(name: Name, data: options.Data = options.DATA_FOLDER) -> None:
    """Submit a schedule's batch now, outside its ticks."""

    async def submit(fleet: AsyncFleet) -> str:
        return (await fleet.schedules.run_now(name)).id

    print_text(f"{name}: batch {with_fleet(data, submit)}")


MOST_SHOWN = 2
"""Ticks after the next one."""


def next_words(view: ScheduleView) -> str:
    """Return when a schedule ticks next."""
    schedule = view.schedule
    lines = "1 line" if schedule.rows == 1 else f"{count(schedule.rows)} lines"
    when = f"next {_local(view, view.next_tick)}" if view.next_tick else "paused"
    return f"{schedule.name}: {lines} for agent {schedule.agent}, {when}"


@dataclass(frozen=True, slots=True)
class JudgedSchedule:
    """A schedule, and what is wrong with it at this moment."""

    view: ScheduleView
    trouble: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return both as JSON-ready data."""
        return {**self.view.to_dict(), "trouble": self.trouble}


async def read(name: str, fleet: AsyncFleet) -> JudgedSchedule:
    """Return a schedule, judged."""
    (found,) = await _judged([await fleet.schedules.get(name)], fleet)
    return found


async def read_all(fleet: AsyncFleet) -> list[JudgedSchedule]:
    """Return all schedules, judged."""
    return await _judged(await fleet.schedules.all(), fleet)


async def _judged(views: Sequence[ScheduleView], fleet: AsyncFleet) -> list[JudgedSchedule]:
    troubles = await fleet.schedules.troubles(views)
    return [JudgedSchedule(one, troubles.get(one.schedule.name, "")) for one in views]


def table(found: Sequence[JudgedSchedule]) -> RenderableType:
    """Return all schedules, a row each."""
    if not found:
        return "There are no schedules. Add one by: stepfleet schedule add NAME FILE --cron ..."
    return _ScheduleList(found)


@dataclass(frozen=True, slots=True)
class _ScheduleList:
    """A row for each schedule; on a narrow terminal the facts of each, a line for each fact."""

    found: Sequence[JudgedSchedule]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from (
            [_rows(self.found)] if options.max_width >= WIDE else map(schedule_picture, self.found)
        )


def _rows(judged: Sequence[JudgedSchedule]) -> Table:
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


def schedule_picture(judged: JudgedSchedule) -> RenderableType:
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
