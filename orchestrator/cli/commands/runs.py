"""`stepfleet show`, `explain`, `events`."""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs: `--help` answers at once

from typing import Annotated

import typer

from stepfleet.orchestrator.cli import options


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (show, explain, events):
        app.command()(command)


def show(
    run: options.RunId,
    full: Annotated[bool, typer.Option("--full", help="Texts in full length.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="What was said, as in a chat.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="The chat, until the run has ended.")
    ] = False,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Show a run's trace: its input, steps, tools, and answer."""
    if chat or follow:
        from stepfleet.orchestrator.cli.views.chat import show_conversation

        show_conversation(run, data, json=json, full=full, follow=follow)
        return
    from stepfleet.orchestrator.cli.views.runs import show_run

    show_run(run, data, json=json, full=full)


def explain(
    run: options.RunId,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Say why a run stopped, or goes on: every criterion with its numbers."""
    from stepfleet.orchestrator.cli.views.runs import explain_run

    explain_run(run, data, json=json)


def events(
    run: options.RunId,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Until the run has ended.")
    ] = False,
    chunks: Annotated[
        bool, typer.Option("--chunks", help="Also the text while it is written; follows.")
    ] = False,
    since: Annotated[
        int, typer.Option("--since", help="Only events behind this sequence number.", min=0)
    ] = 0,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Print a run's events, a line of JSON each."""
    from stepfleet.orchestrator.cli.views.runs import print_events

    print_events(run, data, follow=follow or chunks, chunks=chunks, since=since)
