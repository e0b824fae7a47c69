"""The fleet at a glance, as a terminal shows it. Pure."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepfleet.orchestrator.cli.terminal.format import count, seconds, shown
from stepfleet.orchestrator.store.fleet_overview import FleetOverview


def fleet_lines(overview: FleetOverview) -> RenderableType:
    """Return the fleet's state in a line, and a row per worker."""
    waiting = "?" if overview.queue_length is None else count(overview.queue_length)
    head = Text(
        f"{count(overview.active)} active runs, {waiting} messages waiting, "
        f"longest overdue {seconds(overview.oldest_due_seconds)}, Redis {overview.redis_version}"
    )
    if overview.quarantined:
        head.append(f", {count(overview.quarantined)} messages in quarantine", style="yellow")
    for queue in overview.unserved:
        head.append(f"\nno worker serves the queue {shown(queue, 100)}", style="yellow")
        head.append(" (stepfleet doctor says more)", style="dim")
    if not overview.workers:
        return Group(head, Text("no workers: stepfleet worker --agents MODULE", style="yellow"))
    table = Table(title="Workers", title_justify="left")
    for heading in ("worker", "state", "steps held", "slots", "agents"):
        table.add_column(heading, overflow="fold")
    for worker in overview.workers:
        ago = seconds(worker.seen_seconds_ago)
        table.add_row(
            shown(worker.name, 80),
            Text("alive", style="green") if worker.alive else Text(f"gone for {ago}", style="red"),
            count(worker.held),
            count(worker.slots),
            shown(", ".join(worker.agents), 60),
        )
    return Group(head, table)
