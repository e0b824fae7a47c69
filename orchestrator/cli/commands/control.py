"""`stepfleet retry`, `send`, `cancel`, `pause`, `resume`."""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs: `--help` answers at once

from typing import Annotated

import typer

from stepfleet.orchestrator.cli import options
from stepfleet.orchestrator.cli.terminal import exit_codes


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (retry, send, cancel, pause, resume):
        app.command()(command)


def retry(
    run: options.MaybeRunId = None,
    batch: options.OfBatch = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="The batch's runs that did not complete.")
    ] = False,
    raised: options.Raised = None,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Take ended runs up again at their failed step; what went well is kept."""
    from stepfleet.orchestrator.cli.views.control import retry_one_or_all

    exit_codes.end(
        retry_one_or_all(run, batch, data, failed=failed, raised=raised or [], json=json)
    )


def send(
    run: options.RunId,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The message; - reads stdin.")],
    raised: options.Raised = None,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Give an ended run a further message: it goes on with its conversation, limits start anew."""
    from stepfleet.orchestrator.cli.views.control import send_message

    exit_codes.end(send_message(run, text, data, raised=raised or [], json=json))


def cancel(
    run: options.MaybeRunId = None,
    batch: options.OfBatch = None,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Cancel a run, or all open runs of a batch."""
    from stepfleet.orchestrator.cli.views.control import ask_one_or_all

    exit_codes.end(ask_one_or_all("cancel", run, batch, data, json=json))


def pause(
    run: options.MaybeRunId = None,
    batch: options.OfBatch = None,
    everything: Annotated[bool, typer.Option("--all", help="The whole fleet.")] = False,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Pause a run, a batch or the fleet: tools and model calls under way are finished."""
    from stepfleet.orchestrator.cli.views.control import ask_one_or_all

    exit_codes.end(ask_one_or_all("pause", run, batch, data, json=json, everything=everything))


def resume(
    run: options.MaybeRunId = None,
    batch: options.OfBatch = None,
    everything: Annotated[bool, typer.Option("--all", help="The whole fleet.")] = False,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Let a paused run, batch or fleet go on."""
    from stepfleet.orchestrator.cli.views.control import ask_one_or_all

    exit_codes.end(ask_one_or_all("resume", run, batch, data, json=json, everything=everything))
