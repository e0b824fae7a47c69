"""Commands that look: status, failures, ls, show, events, compare."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from stepfleet.orchestrator.batches.failures import Failures
from stepfleet.orchestrator.cli import options
from stepfleet.orchestrator.cli.approvals import call_text
from stepfleet.orchestrator.cli.batches import (
    batch_list,
    failures_data,
    failures_picture,
    read_status,
    summary,
    with_causes,
)
from stepfleet.orchestrator.cli.explain import AwaitedTool, read_run, waits_of
from stepfleet.orchestrator.cli.fleet import print_found, with_fleet
from stepfleet.orchestrator.cli.options import COMPLETED, SOME_FAILED
from stepfleet.orchestrator.cli.terminal import (
    WIDE,
    Column,
    Rows,
    count,
    every_second,
    print_json,
    print_json_line,
    screen,
    seconds,
    shown,
    shown_error,
    usd,
)
from stepfleet.orchestrator.cli.trace import follow_conversation, trace, whole_view
from stepfleet.orchestrator.client.approvals import asks_below
from stepfleet.orchestrator.client.comparison import RunComparison, RunFigures
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.client.rendering import RunView
from stepfleet.orchestrator.client.runs import inputs_of
from stepfleet.orchestrator.records.batch import BatchProgress
from stepfleet.orchestrator.records.calls.answers import Ask
from stepfleet.orchestrator.records.run.summary import RunPage, RunSummary, RunTree
from stepfleet.orchestrator.store.fleet.checks import stopping, versions
from stepfleet.orchestrator.store.fleet.overview import FleetOverview, KeeperSeen, WorkerSeen
from stepfleet.orchestrator.store.runs.reading import StoredRun


def status(
    batch: Annotated[str | None, typer.Argument(metavar="[ID]", help="A batch id.")] = None,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Show a batch, or the fleet: its workers and newest batches."""
    if batch is None:
        print_found(data, read_fleet, fleet_picture, json=json, as_data=fleet_data)
        return

    print_found(
        data,
        partial(read_status, batch),
        lambda found: summary(*found),
        json=json,
        as_data=lambda found: with_causes(*found),
    )


def failures(
    batch: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="A batch id; else the newest runs.")
    ] = None,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> int:
    """Group runs that did not complete by cause: a batch's, with the command that retries each.

    Without a batch up to 500 failed and 500 stopped runs of the fleet: the newest ones.
    """

    async def read(fleet: AsyncFleet) -> Failures:
        if batch is None:
            return await fleet.runs.failures()
        found = await fleet.batches.get(batch)
        report = every_second(lambda rows: f"failures: {count(rows)} rows examined so far")
        return await found.failures(report)

    found = with_fleet(data, read)
    if json:
        print_json(failures_data(found))
    else:  # no line is broken or cut: the commands are copied
        screen().print(failures_picture(found), soft_wrap=True)
    return SOME_FAILED if found.not_completed else COMPLETED


def workers(json: options.Json = False, data: options.Data = options.DATA_FOLDER) -> None:
    """Show the workers: versions, memory, queues, whether they are stopping; and keepers."""
    print_found(
        data,
        lambda fleet: fleet.overview(),
        crew_picture,
        json=json,
        as_data=lambda found: [one.to_dict() for one in found.workers],
    )


def ls(
    *,
    status: Annotated[
        str | None, typer.Option("--status", help="A status, such as failed or in_progress.")
    ] = None,
    stop_reason: Annotated[
        str | None, typer.Option("--stop-reason", help="Why runs ended, such as time_limit.")
    ] = None,
    agent: Annotated[str | None, typer.Option("--agent", help="The agent's whole name.")] = None,
    batch: Annotated[str | None, typer.Option("--batch", help="A batch id.")] = None,
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="The whole name; '' for runs without one.")
    ] = None,
    parent: Annotated[
        str | None, typer.Option("--parent", help="Started by this run; '': by none.")
    ] = None,
    error: Annotated[
        str | None, typer.Option("--error", help="A part of the error's text.")
    ] = None,
    since: Annotated[
        str | None, typer.Option("--since", help="The earliest creation: 2026-11-23T08:30Z.")
    ] = None,
    where: Annotated[
        str | None,
        typer.Option("--where", metavar="CONDITION", help="As in retry: cause=KEY, tool=stock."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=500, help="How many.")] = 50,
    cursor: Annotated[
        str | None, typer.Option("--cursor", help="Continue after what was listed before.")
    ] = None,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """List runs, the newest first; all conditions hold."""
    which = {
        "status": status,
        "stop_reason": stop_reason,
        "agent": agent,
        "batch": batch,
        "tenant": tenant,
        "parent": parent,
        "error": error,
        "since": since,
        "where": where,
    }
    read = partial(read_page, which=which, limit=limit, cursor=cursor)
    print_found(data, read, page_picture, json=json)


def show(
    run: options.RunOrLine,
    *,
    batch: options.BatchOfLine = None,
    full: Annotated[bool, typer.Option("--full", help="Do not shorten texts.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="The conversation, as in a chat.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="The chat, until the run has ended.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Also the tracebacks of code that failed.")
    ] = False,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Show a run's trace: its input, steps, tools, answer, and the runs below it."""
    if follow:
        follow_conversation(run, batch, data, json=json, full=full)
    elif chat:
        view = partial(whole_view, full=full)
        print_found(data, partial(read_view, run, batch), view, json=json)
    else:
        picture = partial(show_picture, full=full, debug=debug)
        read = partial(read_tree, run, batch)
        print_found(data, read, picture, json=json, as_data=run_data)


def events(
    run: options.RunOrLine,
    batch: options.BatchOfLine = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Until the run has ended.")
    ] = False,
    chunks: Annotated[
        bool, typer.Option("--chunks", help="Also the text as it is written; follows.")
    ] = False,
    since: Annotated[
        int, typer.Option("--since", help="Only events after this sequence number.", min=0)
    ] = 0,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Print a run's events, a line of JSON each."""
    follow = follow or chunks

    async def print_all(fleet: AsyncFleet) -> None:
        run_id = await fleet.runs.find(run, batch)
        await fleet.runs.show(run_id)
        async for event in fleet.runs.events(run_id, since=since, follow=follow, chunks=chunks):
            print_json_line(event)
            await asyncio.sleep(0)

    with_fleet(data, print_all, waits=follow)


def compare(
    first: options.RunOrLine,
    second: Annotated[str, typer.Argument(metavar="OTHER", help="The other one, named alike.")],
    batch: Annotated[
        str | None, typer.Option("--batch", "-b", help="The batch in which they are lines' ids.")
    ] = None,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Compare two runs: their costs, the step where they differ, their outputs."""

    async def read(fleet: AsyncFleet) -> RunComparison:
        named = [await fleet.runs.find(one, batch) for one in (first, second)]
        return await fleet.history.compare(*named)

    print_found(data, read, comparison_picture, json=json)


@dataclass(frozen=True, slots=True)
class Shown:
    """A run, the calls that it waits for, why it does not move, and the runs below it.

    `approvals` are the calls of those below that wait for people.
    """

    run: StoredRun
    awaited: tuple[AwaitedTool, ...]
    waits: str
    tree: RunTree
    approvals: tuple[Ask, ...]


async def read_tree(named: str, batch: str | None, fleet: AsyncFleet) -> Shown:
    """Return the run, or the run of that line, and all else that `show` prints of it."""
    run, awaited = await read_run(named, batch, fleet)
    tree = await fleet.runs.tree(run.run_id)
    waits, _ = await waits_of(run, fleet)
    return Shown(run, awaited, waits, tree, await asks_below(tree, fleet.approvals))


def run_data(found: Shown) -> dict[str, Any]:
    """Return the run's whole result, its messages and the runs below it as JSON-ready data."""
    messages = [message.to_dict() for message in found.run.state.messages]
    below = [one.to_dict() for one in found.tree.below]
    return {**found.run.result().to_dict(), "messages": messages, "below": below}


def show_picture(found: Shown, *, full: bool, debug: bool = False) -> RenderableType:
    """Return the run's trace and the runs below it, with `debug` the tracebacks of what failed."""
    run = found.run
    parts = [trace(run.result(), inputs_of(run), full=full, debug=debug, awaited=found.awaited)]
    if found.waits:
        parts.append(Text.assemble(("waits: ", "bold"), (shown(found.waits), "yellow")))
    tree = below(found.tree, found.approvals)
    return Group(*parts, *([tree] if tree else []))


async def read_view(named: str, batch: str | None, fleet: AsyncFleet) -> RunView:
    """Return the chat window of the run, or of the run of that line."""
    return await fleet.runs.view(await fleet.runs.find(named, batch))


_NAME = 60
_NAMES = 100
"""Agents, and queues, of a worker that are named."""
_NO_WORKERS = "no workers: stepfleet worker --agents MODULE"

Found = tuple[FleetOverview, list[BatchProgress]]


async def read_fleet(fleet: AsyncFleet) -> Found:
    """Return the fleet's state and its newest batches."""
    return await fleet.overview(), await fleet.batches.newest()


def fleet_data(found: Found) -> dict[str, Any]:
    """Return both as JSON-ready data."""
    overview, batches = found
    fleet = overview.to_dict()
    # At both places: scripts of earlier versions read them below `fleet`.
    return {
        "fleet": fleet,
        "workers": fleet["workers"],
        "batches": [one.to_dict() for one in batches],
    }


def fleet_picture(found: Found) -> RenderableType:
    """Return the fleet's state in a line, a row per worker, and a row per batch."""
    overview, batches = found
    waiting = "?" if overview.queue_length is None else count(overview.queue_length)
    head = Text(
        f"{count(overview.active)} active runs, {waiting} messages waiting, "
        f"longest overdue {seconds(overview.oldest_due_seconds)}, Redis {overview.redis_version}"
    )
    if overview.quarantined:
        head.append(f", {count(overview.quarantined)} messages in quarantine", style="yellow")
    if approvals := overview.waiting_for_people:
        wait = "1 call waits" if approvals == 1 else f"{count(approvals)} calls wait"
        head.append(f"\n{wait} for a person: stepfleet approvals", style="cyan")
    if overview.paused:
        head.append("\nthe fleet is paused: stepfleet resume --all", style="magenta")
    for trouble in overview.troubles:
        head.append(f"\n{shown(trouble, 300)}", style="red")
    for outage in overview.outages:
        head.append(f"\n{shown(str(outage), 500)}", style="yellow")
    for limit in overview.limited:
        head.append(f"\n{shown(str(limit), 300)}", style="yellow")
    for queue in overview.unserved:
        head.append(f"\nno worker serves the queue {shown(queue, 100)}", style="yellow")
        head.append(" (details: stepfleet doctor)", style="dim")
    return Group(head, crew_picture(overview), batch_list(batches))


def crew_picture(overview: FleetOverview) -> RenderableType:
    """Return a row per worker, and a line per keeper."""
    keepers = [Text(f"keeper {_keeper(one)}") for one in overview.keepers]
    return Group(workers_picture(overview.workers), *keepers)


def _keeper(one: KeeperSeen) -> str:
    state = "alive" if one.alive else f"silent for {seconds(one.seen_seconds_ago)}"
    memory = "" if one.rss_bytes is None else f", {one.rss_bytes / 2**20:,.0f} MB"
    return f"{shown(one.name, 80)}: {state}{memory} {shown(_build(one), 40)}".rstrip()


def _names(names: Sequence[str] | None) -> str:
    named = ", ".join(shown(name, _NAME) for name in (names or ())[:_NAMES])
    left = len(names or ()) - _NAMES
    return f"{named} and {count(left)} more" if left > 0 else named


def _state(worker: WorkerSeen) -> Text:
    if not worker.alive:
        return Text(f"silent for {seconds(worker.seen_seconds_ago)}", style="red")
    return Text("stopping", style="yellow") if worker.stopping else Text("alive", style="green")


def _build(one: KeeperSeen) -> str:
    return ", ".join(filter(None, (str(one.build), one.release)))


def workers_picture(found: Sequence[WorkerSeen]) -> RenderableType:
    """Return a row per worker, and what is wrong with them together."""
    if not found:
        return Text(_NO_WORKERS, style="yellow")
    columns = (
        *(Column("worker", key=True), Column("state"), Column("steps", number=True)),
        *(Column("memory", number=True), Column("version"), Column("started (UTC)")),
        *(Column("agents", long=True), Column("queues", long=True)),
    )
    rows = []
    for one in found:
        memory = "" if one.rss_bytes is None else f"{one.rss_bytes / 2**20:,.0f} MB"
        started = f"{one.started_at.astimezone(UTC):%m-%d %H:%M:%S}" if one.started_at else ""
        cells = (f"{count(one.held)}/{count(one.slots)}", memory, shown(_build(one), 40), started)
        names = (_names(one.agents), _names(one.queues))
        rows.append((shown(one.name, 80), _state(one), *cells, *names))
    wrong = [one for one in (versions(found), *stopping(found)) if one.fix]
    return Group(
        Rows(columns, rows),
        *(Text(shown(f"{one.found}: {one.fix}", 300), style="yellow") for one in wrong),
    )


MOST_PAGES = 40
"""Pages that are read in search of enough runs: what matches may be rare."""
_ERROR = 60


async def read_page(
    fleet: AsyncFleet, *, which: dict[str, Any], limit: int, cursor: str | None
) -> RunPage:
    """Return up to `limit` runs. Raises `ConfigurationError` that names a wrong condition."""
    runs: list[RunSummary] = []
    looked_at = 0
    for _ in range(MOST_PAGES):
        page = await fleet.runs.page(limit=limit - len(runs), cursor=cursor, **which)
        runs += page.runs
        looked_at += page.looked_at
        cursor = page.next
        if len(runs) >= limit or cursor is None:
            break
    return RunPage(runs=tuple(runs), next=cursor, looked_at=looked_at)


def page_picture(page: RunPage) -> RenderableType:
    """Return the runs as a table, with where to go on."""
    if page.next:
        more = f"More: add --cursor {page.next}"
    else:
        more = "" if page.runs else "No run matches."
    return Group(*([_RunList(page.runs)] if page.runs else []), *([Text(more)] if more else []))


@dataclass(frozen=True, slots=True)
class _RunList:
    """A row for each run; on a narrow terminal a line or two, so that ids are whole."""

    runs: Sequence[RunSummary]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from [_table(self.runs)] if options.max_width >= WIDE else map(_lines, self.runs)


def _table(runs: Sequence[RunSummary]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("run", no_wrap=True)
    for name in ("line", "agent", "status", "steps", "created (UTC)", "error"):
        table.add_column(name, justify="right" if name == "steps" else "left", overflow="fold")
    for run in runs:
        cells = (run.run_id, run.line_id or "", run.agent, _state_of_run(run), count(run.steps))
        created = f"{run.created:%Y-%m-%d %H:%M:%S}"
        table.add_row(*(Text(shown(cell)) for cell in (*cells, created, _error(run))))
    return table


def _lines(run: RunSummary) -> RenderableType:
    line = f" line {run.line_id}," if run.line_id else ""
    about = f"{run.agent},{line} {_state_of_run(run)}, {_steps(run)}, {run.created:%m-%d %H:%M} UTC"
    texts: list[RenderableType] = [
        Text(shown(run.run_id)),
        Padding(Text(shown(about)), (0, 0, 0, 2)),
    ]
    if error := _error(run):
        texts.append(Padding(Text(shown(error), style="red"), (0, 0, 0, 2)))
    return Group(*texts)


def _error(run: RunSummary) -> str:
    return shown_error((run.error or "").partition("\n")[0], _ERROR)


def below(tree: RunTree, approvals: Sequence[Ask] = ()) -> RenderableType | None:
    """Return the runs below a run, each with its calls of `approvals`; None where there is none."""
    if not tree.below and not tree.left_out:
        return None
    branches = _branches(tree, Tree(Text("runs below", style="bold")), approvals)
    return Group(branches, Text("decide: stepfleet approvals")) if approvals else branches


def _branches(tree: RunTree, at: Tree, approvals: Sequence[Ask]) -> Tree:
    for one in tree.below:
        run = one.run
        is_guess = run.price_estimated or run.usage_estimated
        spent = (
            f"{_steps(run)}, {usd(run.cost_usd, guessed=is_guess)}" if run.cost_usd else _steps(run)
        )
        line = Text(f"{shown(run.agent, _ERROR)}: {_state_of_run(run)}, {spent}")
        branch = at.add(line.append(f"  {run.run_id}", style="dim"))
        for approval in approvals:
            if approval.run_id == run.run_id:
                waits = Text("waits for a person: ", style="yellow").append(call_text(approval))
                branch.add(waits)
        _branches(one, branch, approvals)
    if tree.left_out:
        at.add(Text(f"and {count(tree.left_out)} more", style="dim"))
    return at


def _steps(run: RunSummary) -> str:
    return "1 step" if run.steps == 1 else f"{count(run.steps)} steps"


def _state_of_run(run: RunSummary) -> str:
    reason = run.stop_reason.value if run.stop_reason else ""
    status = run.status.value
    return f"{status} ({reason})" if reason not in ("", status) else status


_CELL = 60


def comparison_picture(found: RunComparison) -> RenderableType:
    """Return two runs side by side, where they differ, and their outputs' differences. Pure."""
    table = Table("", "first", "second", show_edge=False)
    one, other = _cells(found.first), _cells(found.second)
    for name, value in one.items():
        table.add_row(name, value, other[name])
    for name, (left, right) in found.settings.items():
        table.add_row(name, shown(left, _CELL), shown(right, _CELL))
    parts: list[RenderableType] = [table, Text(_parting(found))]
    if found.same_output:
        parts.append(Text("The outputs are the same."))
    parts += [Text(shown(line), style=_STYLES.get(line[:1], "")) for line in found.output_diff]
    return Group(*parts)


_STYLES = {"+": "green", "-": "red"}


def _cells(run: RunFigures) -> dict[str, str]:
    ended = f" ({run.stop_reason.value})" if run.stop_reason else ""
    origin = run.origin
    return {
        "run": run.run_id,
        "comes from": f"{origin.kind} of {origin.run_id} at {origin.at}" if origin else "",
        "state": run.lifecycle.value + ended,
        "steps": count(run.steps),
        "tool calls": count(run.tool_calls),
        "tokens": count(run.tokens),
        "cost": usd(run.cost_usd),
        "time in steps": seconds(run.seconds),
    }


def _parting(found: RunComparison) -> str:
    if found.first_differing_step is None:
        return "All steps are alike."
    if found.differs_in == ("missing",):
        return f"They differ from step {found.first_differing_step}: only one of them has it."
    what = ", ".join(found.differs_in).replace("_", " ")
    return f"They differ from step {found.first_differing_step}: {what}."
