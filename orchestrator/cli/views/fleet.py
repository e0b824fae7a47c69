"""The fleet, its newest batches and its response cache, as a terminal shows them."""

from collections.abc import Sequence
from datetime import UTC
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepfleet.orchestrator.cli.terminal.format import count, seconds, shown
from stepfleet.orchestrator.cli.terminal.rows import Column, Rows
from stepfleet.orchestrator.cli.views.batches import batch_list
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.models.caching import CacheStatistics
from stepfleet.orchestrator.records.batch import BatchProgress
from stepfleet.orchestrator.store.fleet.checks import stopping, versions
from stepfleet.orchestrator.store.fleet.overview import FleetOverview, WorkerSeen

_NAME = 60
_NAMES = 100
"""Agents, and queues, of a worker that are named."""
_NO_WORKERS = "no workers: stepfleet worker --agents MODULE"

Found = tuple[FleetOverview, list[BatchProgress]]


async def read(fleet: AsyncFleet) -> Found:
    """Return the fleet's state and its newest batches."""
    return await fleet.overview(), await fleet.batches.newest()


def as_data(found: Found) -> dict[str, Any]:
    """Return both as JSON-ready data."""
    overview, batches = found
    fleet = overview.to_dict()
    # At both places: scripts of earlier versions read them below `fleet`.
    return {
        "fleet": fleet,
        "workers": fleet["workers"],
        "batches": [one.to_dict() for one in batches],
    }


def picture(found: Found) -> RenderableType:
    """Return the fleet's state in a line, a row per worker, and a row per batch."""
    overview, batches = found
    waiting = "?" if overview.queue_length is None else count(overview.queue_length)
    head = Text(
        f"{count(overview.active)} active runs, {waiting} messages waiting, "
        f"longest overdue {seconds(overview.oldest_due_seconds)}, Redis {overview.redis_version}"
    )
    if overview.quarantined:
        head.append(f", {count(overview.quarantined)} messages in quarantine", style="yellow")
    if people := overview.waiting_for_people:
        wait = "1 call waits" if people == 1 else f"{count(people)} calls wait"
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
    return Group(head, _workers(overview), batch_list(batches))


def _workers(overview: FleetOverview) -> RenderableType:
    if not overview.workers:
        return Text(_NO_WORKERS, style="yellow")
    columns = (
        *(Column("worker", key=True), Column("state")),
        *(Column("steps held", number=True), Column("slots", number=True)),
        Column("agents", long=True),
    )
    rows = [
        (shown(one.name, 80), _state(one), count(one.held), count(one.slots), _names(one.agents))
        for one in overview.workers
    ]
    return Rows(columns, rows)


def _names(names: Sequence[str] | None) -> str:
    named = ", ".join(shown(name, _NAME) for name in (names or ())[:_NAMES])
    left = len(names or ()) - _NAMES
    return f"{named} and {count(left)} more" if left > 0 else named


def _state(worker: WorkerSeen) -> Text:
    if not worker.alive:
        return Text(f"silent for {seconds(worker.seen_seconds_ago)}", style="red")
    return Text("stopping", style="yellow") if worker.stopping else Text("alive", style="green")


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
        cells = (f"{count(one.held)}/{count(one.slots)}", memory, shown(one.version, 20), started)
        names = (_names(one.agents), _names(one.queues))
        rows.append((shown(one.name, 80), _state(one), *cells, *names))
    wrong = [one for one in (versions(found), *stopping(found)) if one.fix]
    return Group(
        Rows(columns, rows),
        *(Text(shown(f"{one.found}: {one.fix}", 300), style="yellow") for one in wrong),
    )


def statistics_picture(found: CacheStatistics) -> Table:
    """Return a table of the response cache: a row for each model, and one for all."""
    table = Table("model", "entries", "bytes", "hits", "misses", show_edge=False)
    for model, one in found.by_model.items():
        cells = (one.entries, one.bytes, one.hits, one.misses)
        table.add_row(shown(model, _NAME), *map(count, cells))
    cells = (found.entries, found.bytes, found.hits, found.misses)
    table.add_row("all", *map(count, cells))
    table.caption = f"{found.hit_rate:.0%} hits; room for {count(found.max_bytes)} bytes"
    return table
