"""Commands that steer runs: cancel, pause, resume, retry, send, fork, checkpoints, purge."""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import uuid4

import typer

from stepfleet.orchestrator.batches.selection import Selection
from stepfleet.orchestrator.cli import options
from stepfleet.orchestrator.cli.fleet import with_fleet
from stepfleet.orchestrator.cli.inputs import confirm, overrides_of, seconds_of, standard_input
from stepfleet.orchestrator.cli.options import COMPLETED, SOME_FAILED, data_option
from stepfleet.orchestrator.cli.terminal import (
    count,
    every_second,
    notice,
    print_json,
    print_outcome,
)
from stepfleet.orchestrator.client.checkpoints import (
    CheckpointFolder,
    load_checkpoint,
    save_checkpoint,
)
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.protocol.serialization import SlimSerializationConfig
from stepfleet.orchestrator.store.runs.control import ControlOutcome, ControlResult

WholeFleet = Annotated[bool, typer.Option("--all", help="The whole fleet.")]
Preset = Literal["minimal", "standard", "full"]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Change its configuration: max_steps=20."),
]
At = Annotated[int | None, typer.Option("--at", min=0, help="After this many steps; default: all.")]


def cancel(
    run: options.MaybeRunOrLine = None,
    batch: options.OfBatch = None,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> int:
    """Cancel a run, or all open runs of a batch."""
    return _request("cancel", run, batch, data, json=json)


def pause(
    run: options.MaybeRunOrLine = None,
    batch: options.OfBatch = None,
    everything: WholeFleet = False,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> int:
    """Pause a run, a batch or the fleet; tools and model calls in progress are completed."""
    return _request("pause", run, batch, data, json=json, everything=everything)


def resume(
    run: options.MaybeRunOrLine = None,
    batch: options.OfBatch = None,
    everything: WholeFleet = False,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> int:
    """Resume a paused run, batch or fleet."""
    return _request("resume", run, batch, data, json=json, everything=everything)


def _request(
    verb: str,
    run: str | None,
    batch: str | None,
    data: Path,
    *,
    json: bool,
    everything: bool = False,
) -> int:
    """Cancel, pause or resume (`verb`) a run, a batch or the fleet; return the exit code."""
    if everything and not (run is None and batch is None):
        raise ConfigurationError("--all is for the whole fleet; leave RUN and --batch out")
    if not everything:
        check_target(run, batch)

    async def send(fleet: AsyncFleet) -> int:
        if everything:
            await (fleet.pause() if verb == "pause" else fleet.resume())
            text = "The fleet was resumed"
            if verb == "pause":
                resume = f"stepfleet resume --all{data_option()}"
                text = f"The fleet is paused: no step begins. To continue: {resume}"
            print_outcome({"fleet": f"{verb}d"}, text, json=json)
            return COMPLETED
        if run is not None:
            run_id = await fleet.runs.find(run, batch)
            return _print_run(run_id, await getattr(fleet.runs, verb)(run_id), json=json)
        found = await fleet.batches.get(str(batch))
        # A request is in force at once, for runs that are not yet updated too.
        report = every_second(lambda rows: f"{verb}: in force; {count(rows)} rows updated so far")
        return _print_batch(verb, found.id, await getattr(found, verb)(report), json=json)

    return with_fleet(data, send)


def retry(
    run: options.MaybeRunOrLine = None,
    batch: options.OfBatch = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="The batch's runs that did not complete.")
    ] = False,
    where: Annotated[
        list[str] | None,
        typer.Option(
            "--where",
            metavar="CONDITION",
            help='Only those failed runs: error~"no such product", tool=stock, step=3, cause=KEY.',
        ),
    ] = None,
    raised: options.Raised = None,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> int:
    """Continue ended runs at their failed step; completed steps are kept."""
    _check_retry(run, batch, failed=failed, where=where)
    overrides = overrides_of(raised)

    async def send(fleet: AsyncFleet) -> int:
        if run is not None:
            run_id = await fleet.runs.find(run, batch)
            return _print_run(run_id, await fleet.runs.retry(run_id, **overrides), json=json)
        found = await fleet.batches.get(str(batch))
        report = every_second(lambda rows: f"retry: {count(rows)} rows examined so far")
        number = await found.retry(report, where=where or (), **overrides)
        return _print_batch("retry", found.id, number, json=json)

    return with_fleet(data, send)


def _check_retry(
    run: str | None, batch: str | None, *, failed: bool, where: list[str] | None
) -> None:
    """Raise `ConfigurationError` unless these name one run, or runs of a batch. Pure."""
    if run is not None:
        if failed or where:
            raise ConfigurationError("--failed and --where are for a batch; leave RUN out")
        return
    check_target(run, batch)
    if not (failed or where):
        msg = (
            "retrying a batch needs --failed, for all its runs that did not complete, or "
            "--where for some of them: 'stepfleet failures ID' shows them by cause"
        )
        raise ConfigurationError(msg)
    Selection.parse(where or ())


def send(
    run: options.RunOrLine,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The message; - reads stdin.")],
    batch: options.BatchOfLine = None,
    raised: options.Raised = None,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> int:
    """Send an ended run a further message: its conversation continues, its limits start anew."""
    overrides = overrides_of(raised)
    message = standard_input() if text == "-" else text

    async def give(fleet: AsyncFleet) -> int:
        run_id = await fleet.runs.find(run, batch)
        return _print_run(run_id, await fleet.runs.send(run_id, message, **overrides), json=json)

    return with_fleet(data, give)


def fork(
    run: options.RunOrLine,
    *,
    batch: options.BatchOfLine = None,
    at: At = None,
    changes: Changes = None,
    message: Annotated[
        str | None,
        typer.Option(
            "--message", "-m", help="A message to continue with, in place of the input there."
        ),
    ] = None,
    tools: Annotated[
        str | None, typer.Option("--tools", help="The tools that it may use, with commas.")
    ] = None,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Start a run that begins with the first steps of another one. Prints its id."""
    names = None if tools is None else [one for one in tools.split(",") if one]

    async def create(fleet: AsyncFleet, overrides: Mapping[str, Any]) -> str:
        run_id = await fleet.runs.find(run, batch)
        return await fleet.history.fork(run_id, at=at, message=message, tools=names, **overrides)

    _create_run(create, changes, data, json=json)


checkpoints = typer.Typer(
    no_args_is_help=True,
    help="Save runs as files or short JSON, and restore them.",
)


@checkpoints.command("snapshot")
def snapshot(
    run: options.RunOrLine,
    batch: options.BatchOfLine = None,
    preset: Annotated[Preset, typer.Option("--preset", help="How much is kept.")] = "standard",
    redact: Annotated[bool, typer.Option("--redact", help="Leave out tools' arguments.")] = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Print a short form of a run as JSON: its newest messages and steps, texts shortened."""
    presets = {
        "minimal": SlimSerializationConfig.minimal,
        "standard": SlimSerializationConfig.standard,
        "full": SlimSerializationConfig.full,
    }
    config = presets[preset]().model_copy(update={"redact_tool_args": redact})

    async def read(fleet: AsyncFleet) -> dict[str, Any]:
        return await fleet.history.snapshot(await fleet.runs.find(run, batch), config)

    print_json(with_fleet(data, read))


@checkpoints.command("write")
def checkpoint(
    run: options.RunOrLine,
    *,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="The file (JSON); with --every a folder of such files."),
    ],
    at: At = None,
    every: Annotated[
        int | None, typer.Option("--every", min=1, help="One after every N steps.")
    ] = None,
    keep: Annotated[
        int, typer.Option("--keep", min=1, help="With --every: keep the newest N.")
    ] = 5,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="With --every: until the run has ended.")
    ] = False,
    batch: options.BatchOfLine = None,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Write a run to a file, from which it can be restored, here or elsewhere."""
    if str(out) == "-":
        raise ConfigurationError("--out -: a checkpoint is written to a file; name one")
    if every is None and follow:
        raise ConfigurationError("--follow needs --every: write --every 1 for each step")
    if every is not None and at is not None:
        raise ConfigurationError("--at and --every exclude each other; give one of them")

    async def write(fleet: AsyncFleet) -> None:
        run_id = await fleet.runs.find(run, batch)
        if every is None:
            kept = await fleet.history.checkpoint(run_id, at=at)
            notice(f"{save_checkpoint(kept, out)}: run {run_id}, {len(kept.steps)} steps")
            return
        folder = CheckpointFolder(out, keep=keep)
        async for one in fleet.history.checkpoints(run_id, every=every, follow=follow):
            notice(f"{folder.save(one)}: {len(one.steps)} steps")

    with_fleet(data, write, waits=follow)


@checkpoints.command("restore")
def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A checkpoint.")],
    agent: Annotated[
        str | None,
        typer.Option("--agent", help="Use this agent's configuration, not the checkpoint's."),
    ] = None,
    as_new: Annotated[bool, typer.Option("--as-new", help="A copy with an id of its own.")] = False,
    changes: Changes = None,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Create the run of a checkpoint, which continues where it was. Prints its id."""
    saved = load_checkpoint(file)
    run_id = str(uuid4()) if as_new else None
    _create_run(
        lambda fleet, overrides: fleet.history.restore(saved, agent, run_id=run_id, **overrides),
        changes,
        data,
        json=json,
    )


def purge(
    *,
    batch: Annotated[
        str | None, typer.Option("--batch", "-b", help="Only runs of this batch.")
    ] = None,
    status: Annotated[
        list[str] | None,
        typer.Option("--status", "-s", metavar="STATUS", help="Only runs with this status."),
    ] = None,
    older_than: Annotated[
        str,
        typer.Option("--older-than", metavar="TIME", help="Only runs that ended longer ago: 2d."),
    ] = "0",
    archived: Annotated[
        bool, typer.Option("--archived", help="Also files of the archive, as wholes.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only count them.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Remove ended runs before their retention is over; works while Redis is full."""
    runs: dict[str, Any] = {
        "batch": batch,
        "statuses": status or (),
        "older_than": seconds_of(older_than, "--older-than"),
        "archived": archived,
    }

    async def remove(fleet: AsyncFleet) -> None:
        if not dry_run and not yes:
            found = await fleet.runs.purge(**runs, dry_run=True)
            question = f"Remove {_runs(found)} for good?"
            confirm(question, "add --yes, or look with --dry-run", "removed")
        report = every_second(lambda rows: f"purge: {count(rows)} runs so far")
        done = await fleet.runs.purge(**runs, dry_run=dry_run, on_progress=report)
        text = f"{_runs(done)} {'would be removed' if dry_run else 'removed'}"
        print_outcome({"runs": done, "dry_run": dry_run}, text, json=json)

    with_fleet(data, remove)


def _runs(number: int) -> str:
    return f"{count(number)} ended {'run' if number == 1 else 'runs'}"


def check_target(run: str | None, batch: str | None) -> None:
    """Raise `ConfigurationError` unless a run or a batch is named. Pure."""
    if run is None and batch is None:
        raise ConfigurationError("name one RUN, or --batch ID for all runs of a batch")


def _print_run(run_id: str, result: ControlResult, *, json: bool) -> int:
    data = {"run_id": run_id, "answer": result.outcome, "detail": result.detail}
    print_outcome(data, f"Run {run_id} {result}", json=json)
    ok = result.is_done or result.outcome is ControlOutcome.ACTIVE
    return COMPLETED if ok else SOME_FAILED


def _print_batch(verb: str, batch_id: str, number: int, *, json: bool) -> int:
    if number == 0:
        status = f"stepfleet status {batch_id}{data_option()}"
        text = f"Batch {batch_id}: nothing to {verb}; its runs: {status}"
    else:
        runs = "1 run" if number == 1 else f"{number} runs"
        watch = f"stepfleet watch {batch_id}{data_option()}"
        text = f"Batch {batch_id}: {verb} of {runs}. Progress: {watch}"
    print_outcome({"batch_id": batch_id, "request": verb, "runs": number}, text, json=json)
    return COMPLETED


def _create_run(
    create: Callable[[AsyncFleet, Mapping[str, Any]], Awaitable[str]],
    changes: list[str] | None,
    data: Path,
    *,
    json: bool,
) -> None:
    """Create a run with the overrides in `changes`, and print its id."""
    overrides = overrides_of(changes, "--set")
    run_id = with_fleet(data, lambda fleet: create(fleet, overrides), warn=True)
    print_outcome({"run_id": run_id}, run_id, json=json)
