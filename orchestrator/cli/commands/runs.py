"""`stepfleet ls`, `show`, `explain`, `events`, `snapshot`, `checkpoint`, `fork`, `compare`, ..."""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs: `--help` answers at once

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from stepfleet.orchestrator.cli import options

Preset = Literal["minimal", "standard", "full"]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Change its configuration, as max_steps=20."),
]
At = Annotated[int | None, typer.Option("--at", min=0, help="After so many steps; default: all.")]


def ls(
    *,
    status: Annotated[
        str | None, typer.Option("--status", help="As failed or in_progress.")
    ] = None,
    stop_reason: Annotated[
        str | None, typer.Option("--stop-reason", help="Why runs ended, as time_limit.")
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
        str | None, typer.Option("--since", help="The earliest creation, as 2026-11-23T08:30Z.")
    ] = None,
    where: Annotated[
        str | None,
        typer.Option("--where", metavar="CONDITION", help="As of retry: cause=KEY, tool=stock."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=500, help="How many.")] = 50,
    cursor: Annotated[
        str | None, typer.Option("--cursor", help="Go on behind what was listed before.")
    ] = None,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """List runs, the newest first; all conditions hold."""
    from stepfleet.orchestrator.cli.setup import with_fleet
    from stepfleet.orchestrator.cli.views import listing

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
    read = partial(listing.read, which=which, limit=limit, cursor=cursor)
    with_fleet.show(data, read, listing.picture, json=json)


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
    from stepfleet.orchestrator.cli.setup import with_fleet
    from stepfleet.orchestrator.cli.views import chat as chats
    from stepfleet.orchestrator.cli.views import runs

    if follow:
        chats.follow_conversation(run, batch, data, json=json, full=full)
    elif chat:
        view = partial(chats.whole_view, full=full)
        with_fleet.show(data, partial(runs.read_view, run, batch), view, json=json)
    else:
        picture = partial(runs.picture, full=full, debug=debug)
        read = partial(runs.read_tree, run, batch)
        with_fleet.show(data, read, picture, json=json, as_data=runs.as_data)


def explain(
    run: options.RunOrLine,
    batch: options.BatchOfLine = None,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Explain why a run stopped or continues: its cause, every criterion with its numbers."""
    from stepfleet.orchestrator.cli.setup import with_fleet
    from stepfleet.orchestrator.cli.views import explain, runs

    read = partial(runs.read_explanation, run, batch)
    with_fleet.show(data, read, explain.picture, json=json)


def events(
    run: options.RunId,
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
    from stepfleet.orchestrator.cli.views.runs import print_events

    print_events(run, data, follow=follow or chunks, chunks=chunks, since=since)


def snapshot(
    run: options.RunId,
    preset: Annotated[Preset, typer.Option("--preset", help="How much is kept.")] = "standard",
    redact: Annotated[bool, typer.Option("--redact", help="Leave out tools' arguments.")] = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Print a short form of a run as JSON: its newest messages and steps, texts shortened."""
    from stepfleet.orchestrator.cli.views.history import print_snapshot

    print_snapshot(run, preset, data, redact=redact)


def checkpoint(
    run: options.RunId,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="The file (JSON); with --every a folder of such files."),
    ],
    at: At = None,
    every: Annotated[
        int | None, typer.Option("--every", min=1, help="One after each so many steps.")
    ] = None,
    keep: Annotated[
        int, typer.Option("--keep", min=1, help="With --every: keep so many, the newest.")
    ] = 5,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="With --every: until the run has ended.")
    ] = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Write a run to a file, from which it can be restored, here or elsewhere."""
    from stepfleet.orchestrator.cli.views.history import write_checkpoint, write_checkpoints
    from stepfleet.orchestrator.errors import ConfigurationError

    if str(out) == "-":
        raise ConfigurationError("--out -: a checkpoint is written to a file; name one")
    if every is None and follow:
        raise ConfigurationError("--follow needs --every: write --every 1 for each step")
    if every is not None and at is not None:
        raise ConfigurationError("--at and --every exclude each other; give one of them")
    if every is None:
        write_checkpoint(run, out, data, at=at)
    else:
        write_checkpoints(run, out, data, every=every, keep=keep, follow=follow)


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
    from uuid import uuid4

    from stepfleet.orchestrator.cli.views.history import create_run
    from stepfleet.orchestrator.client.checkpoints import load_checkpoint

    saved = load_checkpoint(file)
    run_id = str(uuid4()) if as_new else None
    create_run(
        lambda fleet, overrides: fleet.history.restore(saved, agent, run_id=run_id, **overrides),
        changes or [],
        data,
        json=json,
    )


def fork(
    run: options.RunId,
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
    from stepfleet.orchestrator.cli.views.history import create_run

    names = None if tools is None else [one for one in tools.split(",") if one]
    create_run(
        lambda fleet, overrides: fleet.history.fork(
            run, at=at, message=message, tools=names, **overrides
        ),
        changes or [],
        data,
        json=json,
    )


def compare(
    first: Annotated[str, typer.Argument(metavar="RUN", help="A run id.")],
    second: Annotated[str, typer.Argument(metavar="OTHER", help="Another run id.")],
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Compare two runs: their costs, the step where they part, their outputs."""
    from stepfleet.orchestrator.cli.setup import with_fleet
    from stepfleet.orchestrator.cli.views.history import comparison_picture

    with_fleet.show(
        data, lambda fleet: fleet.history.compare(first, second), comparison_picture, json=json
    )
