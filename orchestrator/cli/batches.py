"""Batches and their failures by cause, as a terminal shows them."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepfleet.orchestrator.batches.failures import FailureGroup, Failures
from stepfleet.orchestrator.cli.options import data_option
from stepfleet.orchestrator.cli.progress import TOP, cause_lines, submission_state
from stepfleet.orchestrator.cli.terminal import (
    Column,
    Rows,
    count,
    seconds,
    shown,
    usd,
)
from stepfleet.orchestrator.client.fleet import AsyncBatch, AsyncFleet
from stepfleet.orchestrator.errors import ArchiveError
from stepfleet.orchestrator.records.batch import BatchProgress
from stepfleet.orchestrator.records.calls.answers import AskCount

log = logging.getLogger(__name__)
_ID_CHARACTERS = 60
_AGENT_CHARACTERS = 100
"""A file's lines may name several agents."""


NO_APPROVALS = AskCount()


def summary(
    progress: BatchProgress,
    failures: Failures,
    approvals: AskCount = NO_APPROVALS,
    *,
    wall_seconds: float | None = None,
) -> RenderableType:
    """Return the outcome of a batch by status, stop reason and top causes, and its cost.

    `approvals` are its calls that wait for people.
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
    waits = f"{approvals}:\n  stepfleet approvals --batch {progress.batch_id}{data_option()}"
    shown_approvals = [Text(waits, style="yellow")] if approvals.count else []
    return Group(title, table, *shown_approvals, *top(failures))


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
    """Yield what is to be said besides the counts: its label, its text, its style."""
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


MOST_SHOWN = 20
READ = 2_000
"""Most runs that are read for a summary."""
_LINE = 160


async def read_status(batch_id: str, fleet: AsyncFleet) -> tuple[BatchProgress, Failures, AskCount]:
    """Return a batch's progress, its failures by cause, and how many calls wait for people."""
    batch = await fleet.batches.get(batch_id)
    progress = await batch.progress()
    approvals = await fleet.approvals.of_batch(batch.id) if progress.open else NO_APPROVALS
    return progress, await causes_of(batch, progress), approvals


async def causes_of(batch: AsyncBatch, progress: BatchProgress) -> Failures:
    """Return the failures of a batch for its summary; none of an archive that is out of reach."""
    if progress.done == progress.completed:
        return Failures(batch_id=batch.id, not_completed=0, read=0)
    try:
        return await batch.failures(limit=READ)
    except ArchiveError as error:
        log.warning("why runs failed cannot be read: %s", error.message)
        left = progress.done - progress.completed
        return Failures(batch_id=batch.id, not_completed=left, read=0)


def command(failures: Failures, group: FailureGroup) -> str:
    """Return the command that retries the runs of a group, or lists those of a fleet."""
    if not failures.batch_id:
        return f"stepfleet ls --where {group.where}{data_option()}"
    raised = raises([group])
    named = f"--batch {failures.batch_id} --where {group.where}"
    return f"stepfleet retry {named}{raised}{data_option()}"


def raises(groups: Iterable[FailureGroup]) -> str:
    """Return the options of a retry of all these groups, without which it would refuse some. Pure.

    A run that a limit has stopped would end at once again.
    """
    highest: dict[str, int | float] = {}
    for group in groups:
        for name, value in group.limits.items():
            highest[name] = max(value, highest.get(name, 0))
    return "".join(f" --raise {name}={value}" for name, value in highest.items())


def failures_data(failures: Failures) -> dict[str, Any]:
    """Return the failures as JSON-ready data; each group has its `retry` command. Pure.

    Without a batch it is the command that lists the group's runs, `list`.
    """
    data = failures.to_dict()
    for found, group in zip(data["groups"], failures.groups, strict=True):
        found["retry" if failures.batch_id else "list"] = command(failures, group)
    return data


def with_causes(
    progress: BatchProgress, failures: Failures, approvals: AskCount = NO_APPROVALS
) -> dict[str, Any]:
    """Return a batch's progress as JSON-ready data, with its top `causes`. Pure.

    `approvals` are its calls that wait for people.
    """
    causes = [
        {"runs": group.runs, **group.cause.to_dict(), "example": group.example.run_id}
        for group in failures.groups[:TOP]
    ]
    return {
        **progress.to_dict(),
        "causes": causes,
        "causes_of": failures.read,
        "waiting_for_people": approvals.count,
    }


def top(failures: Failures) -> Iterator[RenderableType]:
    """Yield the top causes, a line each, and the command for the rest."""
    if not failures.groups:
        return
    part = failures.read < failures.not_completed
    yield Text(f"Causes{_of_part(failures) if part else ''}:")
    yield from cause_lines(failures.groups[:TOP])
    yield Text(f"More: stepfleet failures {failures.batch_id}{data_option()}")


def failures_picture(failures: Failures) -> RenderableType:
    """Return the failures, the most frequent first."""
    about = f"Batch {failures.batch_id}" if failures.batch_id else "Newest runs of the fleet"
    if not failures.not_completed:
        return Text(f"{about}: no run has failed")
    parts: list[RenderableType] = [
        Text(
            f"{about}: {count(failures.not_completed)} runs did not complete, "
            f"{count(failures.read)} were read, {_causes(len(failures.groups))}"
        )
    ]
    for group in failures.groups[:MOST_SHOWN]:
        parts += ["", *_group(failures, group)]
    hidden = sum(group.runs for group in failures.groups[MOST_SHOWN:]) + failures.ungrouped
    if hidden:
        named = f"stepfleet failures {failures.batch_id}".rstrip()
        more = f"{count(hidden)} runs of more causes: {named} --json{data_option()}"
        parts += ["", Text(more)]
    return Group(*parts)


def _group(failures: Failures, group: FailureGroup) -> Iterator[RenderableType]:
    head = Text(f"{count(group.runs):>7}  ")
    head.append(shown(str(group.cause), _LINE), style="bold red")
    yield head
    places = [_counted("step", group.steps), _counted("", group.models)]
    yield Text(f"         {_counted('', group.stop_reasons)}; {'; '.join(places)}", style="dim")
    example = group.example
    line = f"line {shown(example.line_id, 60)}, " if example.line_id else ""
    said = f": {shown(example.text, _LINE)}" if example.text else ""
    yield Text(f"         e.g. {line}run {example.run_id}{said}")
    yield Text(f"         {command(failures, group)}", style="cyan")


def _counted(label: str, counts: Mapping[Any, int], most: int = 3) -> str:
    """Return names with their counts, or a single name alone."""
    names = [f"{label} {shown(str(name), 60)}".strip() for name in counts]
    if len(names) == 1:
        return names[0]
    pairs = zip(names, counts.values(), strict=True)
    listed = [f"{name} ({count(number)})" for name, number in pairs]
    return ", ".join(listed[:most]) + (" ..." if len(listed) > most else "")


def _causes(number: int) -> str:
    return "1 cause" if number == 1 else f"{count(number)} causes"


def _of_part(failures: Failures) -> str:
    return f" (of {count(failures.read)} of {count(failures.not_completed)} runs)"
