"""`stepfleet show`, `explain`, `events`."""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs: `--help` answers at once

from functools import partial
from typing import Annotated

import typer

from stepfleet.orchestrator.cli import options


def show(
    run: options.RunId,
    full: Annotated[bool, typer.Option("--full", help="Do not shorten texts.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="The conversation, as in a chat.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="The chat, until the run has ended.")
    ] = False,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Show a run's trace: its input, steps, tools, and answer."""
    from stepfleet.orchestrator.cli.setup import with_fleet
    from stepfleet.orchestrator.cli.views import chat as chats
    from stepfleet.orchestrator.cli.views import runs

    if follow:
        chats.follow_conversation(run, data, json=json, full=full)
    elif chat:
        view = partial(chats.whole_view, full=full)
        with_fleet.show(data, lambda fleet: fleet.runs.view(run), view, json=json)
    else:
        picture = partial(runs.picture, full=full)
        with_fleet.show(data, partial(runs.read, run), picture, json=json, as_data=runs.as_data)


def explain(
    run: options.RunId,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Explain why a run stopped or continues: every criterion with its numbers."""
    from stepfleet.orchestrator.cli.setup import with_fleet
    from stepfleet.orchestrator.cli.views import explain, runs

    read = partial(runs.read_explanation, run)
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
