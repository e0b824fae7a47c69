"""`stepfleet snapshot`, `checkpoint`, `restore`, `fork`, `compare`."""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs: `--help` answers at once

from pathlib import Path
from typing import Annotated, Literal

import typer

from stepfleet.orchestrator.cli import options

Preset = Literal["minimal", "standard", "full"]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Change its configuration, as max_steps=20."),
]
At = Annotated[
    int | None,
    typer.Option("--at", min=0, help="Behind that many steps; all of them if not given."),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (snapshot, checkpoint, restore, fork, compare):
        app.command()(command)


def snapshot(
    run: options.RunId,
    preset: Annotated[Preset, typer.Option("--preset", help="How much is kept.")] = "standard",
    redact: Annotated[bool, typer.Option("--redact", help="Leave out tools' arguments.")] = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Print a run in short, as JSON: its newest messages and steps, texts cut."""
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
        int | None, typer.Option("--every", min=1, help="One behind each so many steps.")
    ] = None,
    keep: Annotated[
        int, typer.Option("--keep", min=1, help="With --every: how many stay, the newest.")
    ] = 5,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="With --every: until the run has ended.")
    ] = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Write everything of a run to a file, from which it can go on, here or elsewhere."""
    from stepfleet.orchestrator.cli.views.history import KeepAll, write_checkpoint

    write_checkpoint(run, out, data, at=at, all_of=KeepAll(every, keep, follow=follow))


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A checkpoint.")],
    agent: Annotated[
        str | None,
        typer.Option("--agent", help="Take this agent's configuration, not the checkpoint's."),
    ] = None,
    as_new: Annotated[bool, typer.Option("--as-new", help="A copy with an id of its own.")] = False,
    changes: Changes = None,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Create the run of a checkpoint: it goes on where it stood. Prints its id."""
    from stepfleet.orchestrator.cli.views.history import restore_run

    restore_run(file, agent, changes or [], data, as_new=as_new, json=json)


def fork(
    run: options.RunId,
    at: At = None,
    changes: Changes = None,
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="Say this there, or ask it instead.")
    ] = None,
    tools: Annotated[
        str | None, typer.Option("--tools", help="The tools that it may use, with commas.")
    ] = None,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Start a run that begins with the first steps of another one. Prints its id."""
    from stepfleet.orchestrator.cli.views.history import ForkWish, fork_run

    fork_run(ForkWish(run, at, changes or [], message, tools), data, json=json)


def compare(
    first: Annotated[str, typer.Argument(metavar="RUN", help="A run id.")],
    second: Annotated[str, typer.Argument(metavar="OTHER", help="Another run id.")],
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Show two runs side by side: what they took, where they part, how their outputs differ."""
    from stepfleet.orchestrator.cli.views.history import compare_runs

    compare_runs(first, second, data, json=json)
