"""The command archive: moves ended runs to files, brings them back, verifies the files."""

from typing import Annotated

import typer

from stepfleet.orchestrator.cli import options
from stepfleet.orchestrator.cli.fleet import with_fleet
from stepfleet.orchestrator.cli.inputs import seconds_of
from stepfleet.orchestrator.cli.options import COMPLETED, SOME_FAILED
from stepfleet.orchestrator.cli.terminal import (
    count,
    every_second,
    moment,
    print_outcome,
    seconds,
    shown,
)
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.errors import ConfigurationError, NotFoundError
from stepfleet.orchestrator.records.archive import (
    Archived,
    ArchiveDamage,
    ArchiveFigures,
    ArchiveVerification,
)

_NO_ARCHIVE = "no archive is named: set STEPFLEET_ARCHIVE_URL, such as s3://bucket/folder"
_UNITS = ("B", "kB", "MB", "GB", "TB")


def archive(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID", help="With --restore: runs, batches, lines' ids."),
    ] = None,
    *,
    restore: Annotated[
        bool, typer.Option("--restore", help="Bring archived runs back to Redis.")
    ] = False,
    state: Annotated[
        bool, typer.Option("--state", help="Show how much is archived, what is due, what fails.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all files back; exit code 1 for damaged ones.")
    ] = False,
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than", metavar="TIME", help="Runs that ended longer ago: 1d. Else the setting."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Only count the runs that would go.")
    ] = False,
    batch: options.BatchOfLine = None,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> int:
    """Move ended runs that are due from Redis to the archive, now; keepers and workers do, too."""
    if restore + state + verify > 1:
        raise ConfigurationError("--restore, --state and --verify exclude each other; give one")
    if restore + state + verify and (older_than is not None or dry_run):
        raise ConfigurationError("--older-than and --dry-run are for moving runs; leave them out")
    if restore != bool(ids):
        msg = "name the runs or batches: stepfleet archive --restore ID..."
        raise ConfigurationError(msg if restore else f"IDs are for --restore; {msg}")
    if batch is not None and not restore:
        raise ConfigurationError("--batch is for lines' ids: stepfleet archive --restore LINE...")
    after = None if older_than is None else seconds_of(older_than, "--older-than")

    async def work(fleet: AsyncFleet) -> int:
        if restore:
            return await _restore(fleet, ids or [], batch, json=json)
        if state:
            return await _state(fleet, json=json)
        if verify:
            return await _verify(fleet, json=json)
        return await _move(fleet, after, dry_run=dry_run, json=json)

    return with_fleet(data, work)


async def _move(fleet: AsyncFleet, after: float | None, *, dry_run: bool, json: bool) -> int:
    report = every_second(lambda runs: f"archive: {_runs(runs)} moved so far")
    moved = await fleet.archive.move(older_than=after, dry_run=dry_run, on_progress=report)
    text = f"{_runs(moved.runs)} would be moved" if dry_run else moved_in_words(moved)
    print_outcome({**moved.to_dict(), "dry_run": dry_run}, text, json=json)
    return COMPLETED


async def _restore(fleet: AsyncFleet, ids: list[str], batch: str | None, *, json: bool) -> int:
    named = [await _resolved(fleet, one, batch) for one in ids]
    report = every_second(lambda runs: f"archive: {_runs(runs)} brought back so far")
    done = await fleet.archive.restore(named, on_progress=report)
    text = f"{_runs(done)} brought back" if done else "nothing to bring back: none is archived"
    print_outcome({"restored": done}, text, json=json)
    return COMPLETED


async def _resolved(fleet: AsyncFleet, text: str, batch: str | None) -> str:
    """Return the id of a batch, or of the run that `text` names as all commands take it."""
    if batch is None:
        try:
            return (await fleet.batches.get(text)).id
        except NotFoundError:
            pass
    return await fleet.runs.find(text, batch)


async def _state(fleet: AsyncFleet, *, json: bool) -> int:
    found = await fleet.archive.state()
    if not (found.url or found.files):
        raise ConfigurationError(_NO_ARCHIVE)
    text = state_in_words(found, fleet.settings.archive_after)
    print_outcome({**found.to_dict(), "after": fleet.settings.archive_after}, text, json=json)
    return COMPLETED


async def _verify(fleet: AsyncFleet, *, json: bool) -> int:
    report = every_second(lambda files: f"archive: {_files(files)} read so far")
    found = await fleet.archive.verify(on_progress=report)
    print_outcome(found.to_dict(), verified_in_words(found), json=json)
    return SOME_FAILED if found.damaged else COMPLETED


def moved_in_words(moved: Archived) -> str:
    """Return what was moved, and what had to stay. Pure."""
    done = "nothing was due"
    if moved.runs:
        done = f"{_runs(moved.runs)} moved, in {_files(moved.files)} of {size(moved.bytes)}"
    if moved.left:
        stay = "stays" if moved.left == 1 else "stay"
        done += f"; {_runs(moved.left)} {stay} for now, as others have yet to learn of the end"
    return done


def state_in_words(found: ArchiveFigures, after: float) -> str:
    """Return the state of an archive whose runs go `after` seconds after their end. Pure."""
    where = found.url or f"not named here ({_NO_ARCHIVE.partition(': ')[2]}, to move more)"
    due = f"{_runs(found.due_runs)} without a batch, {_batches(found.due_batches)}"
    lines = [
        f"archive   {where}",
        f"moved     {_runs(found.runs)}, {size(found.bytes)} in all; {_files(found.files)} now",
        f"due       {due} (ended {seconds(after)} ago or earlier)",
    ]
    if found.error:
        lines.append(f"failing   since {moment(found.failing_since)}: {found.error}")
    return shown("\n".join(lines))


def verified_in_words(found: ArchiveVerification) -> str:
    """Return what was read back, a line for each file that is damaged and its runs. Pure."""
    total = f"{_runs(found.runs)} in {size(found.bytes)} can be read"
    if not found.damaged:
        return f"{_files(found.files)} read, all whole: {total}"
    head = f"{_files(len(found.damaged))} of {count(found.files)} missing or damaged; {total}"
    return shown("\n".join([head, *map(_damage_in_words, found.damaged)]))


def _damage_in_words(one: ArchiveDamage) -> str:
    runs = "".join(f"\n  run {run_id}" for run_id in one.run_ids) or f" ({_runs(one.runs)})"
    return f"{one.url}/{one.file}: {one.why}{runs}"


def size(value: int) -> str:
    """Return a number of bytes: `812 B`, `1.4 MB`. Pure."""
    number, unit = float(value), 0
    while number >= 1000 and unit < len(_UNITS) - 1:  # noqa: PLR2004 - the step of the units
        number, unit = number / 1000, unit + 1
    return f"{number:.1f} {_UNITS[unit]}" if unit else f"{value} {_UNITS[0]}"


def _runs(number: int) -> str:
    return f"{count(number)} {'run' if number == 1 else 'runs'}"


def _files(number: int) -> str:
    return f"{count(number)} {'file' if number == 1 else 'files'}"


def _batches(number: int) -> str:
    return f"{count(number)} {'batch' if number == 1 else 'batches'}"
