"""Tables and lines about batches. Pure: records in, things to print out."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepfleet.orchestrator.cli.terminal.eta import Pace
from stepfleet.orchestrator.cli.terminal.format import count, seconds, shown, usd
from stepfleet.orchestrator.records.batch import BatchProgress

_ID_CHARACTERS = 60


def progress_line(progress: BatchProgress, pace: Pace, notice: str = "") -> str:
    """Return the state of a batch as one plain line."""
    parts = [
        f"{count(progress.done)}/{count(progress.total)} done",
        f"{count(progress.done - progress.completed)} not completed"
        if progress.done > progress.completed
        else "",
        f"{count(progress.in_progress)} running",
        f"{count(progress.queued)} queued",
        f"{count(progress.paused)} paused" if progress.paused else "",
        f"{pace.steps_per_second:.1f} steps/s",
        f"{count(progress.tokens)} tokens",
        usd(progress.cost_usd),
        f"submission {said}" if (said := submission_said(progress)) else "",
        f"ETA {seconds(pace.eta_seconds(progress.open))}" if progress.open else "",
        notice,
    ]
    return ", ".join(part for part in parts if part)


def submission_said(progress: BatchProgress) -> str:
    """Return how far a batch's submission is, where it is not complete; else nothing."""
    if progress.sealed:
        return "cancelled" if progress.cancel_requested else ""
    if progress.cancel_requested:
        return f"cancelled after {count(progress.submitted)} of {count(progress.total)} lines"
    kind = "incomplete" if progress.submission_stalled else "under way"
    return f"{kind}: {count(progress.submitted)} of {count(progress.total)} lines"


def summary(progress: BatchProgress, wall_seconds: float | None = None) -> RenderableType:
    """Return what became of a batch: by status and stop reason, and what it took."""
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    states = {
        "completed": (progress.completed, "green"),
        "failed": (progress.failed, "red"),
        "stopped at a limit": (progress.stopped, "yellow"),
        "cancelled": (progress.cancelled, "yellow"),
        "queued": (progress.queued, ""),
        "in progress": (progress.in_progress, ""),
        "paused": (progress.paused, ""),
    }
    for label, (value, style) in states.items():
        if value or label == "completed":
            table.add_row(label, Text(count(value), style=style))
    table.add_row("total", count(progress.total), end_section=True)
    if said := submission_said(progress):
        table.add_row("submission", Text(said, style="yellow"), end_section=True)
    if progress.past_retention:
        past = f"{count(progress.past_retention)} results are past retention"
        table.add_row("retention", Text(past, style="yellow"), end_section=True)
    for reason, value in sorted(progress.by_reason.items(), key=lambda one: -one[1]):
        if value:
            table.add_row(f"stop reason {shown(reason, 40)}", count(value))
    table.add_section()
    table.add_row("steps", count(progress.steps))
    table.add_row("model calls", count(progress.llm_calls))
    table.add_row("tokens", count(progress.tokens))
    table.add_row("cost", usd(progress.cost_usd))
    if progress.lost:
        table.add_row("attempts not committed", count(progress.lost))
    if wall_seconds is not None:
        table.add_row("wall time", seconds(wall_seconds))
    return Group(Text(f"Batch {progress.batch_id}"), table)


def batch_list(batches: Sequence[BatchProgress]) -> RenderableType:
    """Return the batches, one per row."""
    if not batches:
        return Text("no batches")
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("batch", no_wrap=True)
    table.add_column("agent", overflow="fold")
    table.add_column("created UTC", no_wrap=True)
    for heading in ("ended", "not ok", "cost"):
        table.add_column(heading, justify="right", no_wrap=True)
    for batch in batches:
        table.add_row(
            shown(batch.batch_id, _ID_CHARACTERS),
            shown(batch.agent or "-", 30),
            f"{batch.created:%m-%d %H:%M}",
            f"{count(batch.done)}/{count(batch.total)}",
            count(batch.done - batch.completed),
            usd(batch.cost_usd),
        )
    return table
