"""A batch's failures by cause, as a terminal shows them, with the command that retries each."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from stepfleet.orchestrator.batches.failures import FailureGroup, Failures
from stepfleet.orchestrator.cli.options import data_option
from stepfleet.orchestrator.cli.setup.with_fleet import with_fleet
from stepfleet.orchestrator.cli.terminal.exit_codes import COMPLETED, SOME_FAILED
from stepfleet.orchestrator.cli.terminal.format import count, shown
from stepfleet.orchestrator.cli.terminal.output import every_second, print_json, screen
from stepfleet.orchestrator.cli.terminal.progress import TOP, cause_lines
from stepfleet.orchestrator.client.fleet import AsyncBatch, AsyncFleet
from stepfleet.orchestrator.records.batch import BatchProgress
from stepfleet.orchestrator.records.calls.answers import AskCount

MOST_SHOWN = 20
READ = 2_000
"""Runs that are read for a summary at the most."""
_LINE = 160
NOBODY = AskCount()


def show_failures(batch_id: str | None, data: Any, *, json: bool) -> int:
    """Print the failures of a batch, or of the fleet's newest runs; return the exit code."""

    async def read(fleet: AsyncFleet) -> Failures:
        if batch_id is None:
            return await fleet.runs.failures()
        batch = await fleet.batches.get(batch_id)
        report = every_second(lambda rows: f"failures: {count(rows)} rows examined so far")
        return await batch.failures(report)

    failures = with_fleet(data, read)
    if json:
        print_json(as_data(failures))
    else:  # no line is broken or cut: the commands are copied
        screen().print(picture(failures), soft_wrap=True)
    return SOME_FAILED if failures.not_completed else COMPLETED


async def read_status(batch_id: str, fleet: AsyncFleet) -> tuple[BatchProgress, Failures, AskCount]:
    """Return a batch's progress, its failures by cause, and how many calls wait for people."""
    batch = await fleet.batches.get(batch_id)
    progress = await batch.progress()
    asks = await fleet.approvals.of_batch(batch.id) if progress.open else NOBODY
    return progress, await causes_of(batch, progress), asks


async def causes_of(batch: AsyncBatch, progress: BatchProgress) -> Failures:
    """Return the failures of a batch for its summary."""
    if progress.done == progress.completed:
        return Failures(batch_id=batch.id, not_completed=0, read=0)
    return await batch.failures(limit=READ)


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


def as_data(failures: Failures) -> dict[str, Any]:
    """Return the failures as JSON-ready data; each group has its `retry` command. Pure.

    Without a batch it is the command that lists the group's runs, `list`.
    """
    data = failures.to_dict()
    for found, group in zip(data["groups"], failures.groups, strict=True):
        found["retry" if failures.batch_id else "list"] = command(failures, group)
    return data


def with_causes(
    progress: BatchProgress, failures: Failures, asks: AskCount = NOBODY
) -> dict[str, Any]:
    """Return a batch's progress as JSON-ready data, with its top `causes`. Pure.

    `asks` are its calls that wait for people.
    """
    causes = [
        {"runs": group.runs, **group.cause.to_dict(), "example": group.example.run_id}
        for group in failures.groups[:TOP]
    ]
    return {
        **progress.to_dict(),
        "causes": causes,
        "causes_of": failures.read,
        "waiting_for_people": asks.count,
    }


def top(failures: Failures) -> Iterator[RenderableType]:
    """Yield the top causes, a line each, and the command for the rest."""
    if not failures.groups:
        return
    part = failures.read < failures.not_completed
    yield Text(f"Causes{_of_part(failures) if part else ''}:")
    yield from cause_lines(failures.groups[:TOP])
    yield Text(f"More: stepfleet failures {failures.batch_id}{data_option()}")


def picture(failures: Failures) -> RenderableType:
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
