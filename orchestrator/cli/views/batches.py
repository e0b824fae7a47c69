"""Batches as a terminal shows them. Pure."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepfleet.orchestrator.batches.failures import Failures
from stepfleet.orchestrator.cli.options import data_option
from stepfleet.orchestrator.cli.terminal.format import count, seconds, shown, usd
from stepfleet.orchestrator.cli.terminal.progress import submission_state
from stepfleet.orchestrator.cli.terminal.rows import Column, Rows
from stepfleet.orchestrator.cli.views.failures import NOBODY, top
from stepfleet.orchestrator.records.batch import BatchProgress
from stepfleet.orchestrator.records.calls.answers import AskCount

_ID_CHARACTERS = 60
_AGENT_CHARACTERS = 100
"""A file's lines may name several agents."""


def summary(
    progress: BatchProgress,
    failures: Failures,
    asks: AskCount = NOBODY,
    *,
    wall_seconds: float | None = None,
) -> RenderableType:
    """Return the outcome of a batch by status, stop reason and top causes, and its cost.

    `asks` are its calls that wait for people.
    """
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
    for label, text, style in _beside(progress):
        table.add_row(label, Text(text, style=style), end_section=True)
    for reason, value in sorted(progress.by_reason.items(), key=lambda one: -one[1]):
        if value:
            table.add_row(f"stop reason {shown(reason, 40)}", count(value))
    table.add_section()
    table.add_row("steps", count(progress.steps))
    table.add_row("model calls", count(progress.llm_calls))
    table.add_row("tokens", count(progress.tokens))
    is_guessed = progress.default_priced_usd > 0
    table.add_row("cost", usd(progress.cost_usd, guessed=is_guessed))
    if is_guessed:
        table.add_row("of it at a default price", usd(progress.default_priced_usd))
    if progress.lost:
        table.add_row("attempts not committed", count(progress.lost))
    if wall_seconds is not None:
        table.add_row("wall time", seconds(wall_seconds))
    title = Text(f"Batch {progress.batch_id}")
    if progress.held and wall_seconds is None:  # who followed the batch prints it at the end
        title.append(f"\n{shown(progress.held_text)}", style="red")
    waits = f"{asks}:\n  stepfleet approvals --batch {progress.batch_id}{data_option()}"
    people = [Text(waits, style="yellow")] if asks.count else []
    return Group(title, table, *people, *top(failures))


def batch_list(batches: Sequence[BatchProgress]) -> RenderableType:
    """Return the batches, one per row."""
    if not batches:
        return Text("no batches")
    columns = (
        *(Column("batch", key=True), Column("created UTC")),
        *(Column(name, number=True) for name in ("ended", "not ok", "cost")),
        Column("agent", long=True),
    )
    rows = [
        (
            shown(batch.batch_id, _ID_CHARACTERS),
            f"{batch.created:%m-%d %H:%M}",
            _ended(batch),
            count(batch.done - batch.completed),
            usd(batch.cost_usd, guessed=batch.default_priced_usd > 0),
            shown(batch.agent or "-", _AGENT_CHARACTERS),
        )
        for batch in batches
    ]
    return Rows(columns, rows)


def _beside(batch: BatchProgress) -> Iterator[tuple[str, str, str]]:
    """Yield what is to be said beside the counts: its label, its text, its style."""
    if state := submission_state(batch):
        yield "submission", state, "yellow"
    if batch.follows:
        yield "follows batch", batch.follows, ""
    if batch.left_out:
        yield "left out", f"{count(batch.left_out)} runs of that batch have no result", "yellow"
    for one in batch.next:
        yield "is followed by", one, ""
    if batch.cut_answers:
        yield "answers cut at max_tokens", count(batch.cut_answers), "yellow"
    if batch.filtered_answers:
        yield "answers cut by a content filter", count(batch.filtered_answers), "yellow"
    if batch.past_retention:
        yield "retention", f"{count(batch.past_retention)} results are past retention", "yellow"


def _ended(batch: BatchProgress) -> str:
    if batch.waits:
        return "waits"
    return f"{'held at ' if batch.held else ''}{count(batch.done)}/{count(batch.total)}"
