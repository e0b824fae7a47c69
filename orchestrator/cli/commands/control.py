"""`stepfleet retry`, `send`, `cancel`, `pause`, `resume`, `purge`."""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs: `--help` answers at once

from typing import Annotated

import typer

from stepfleet.orchestrator.cli import options

WholeFleet = Annotated[bool, typer.Option("--all", help="The whole fleet.")]


def retry(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="A run id, or a line's id in --batch or a new batch."),
    ] = None,
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
    from stepfleet.orchestrator.cli.views.control import Retries, retry_runs

    target = Retries(run, batch, failed=failed, where=tuple(where or ()))
    return retry_runs(target, data, raised=raised or [], json=json)


def send(
    run: options.RunId,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The message; - reads stdin.")],
    raised: options.Raised = None,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> int:
    """Send an ended run a further message: its conversation continues, its limits start anew."""
    from stepfleet.orchestrator.cli.views.control import send_message

    return send_message(run, text, data, raised=raised or [], json=json)


def cancel(
    run: options.MaybeRunId = None,
    batch: options.OfBatch = None,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> int:
    """Cancel a run, or all open runs of a batch."""
    from stepfleet.orchestrator.cli.views.control import request

    return request("cancel", run, batch, data, json=json)


def pause(
    run: options.MaybeRunId = None,
    batch: options.OfBatch = None,
    everything: WholeFleet = False,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> int:
    """Pause a run, a batch or the fleet; tools and model calls in progress are completed."""
    from stepfleet.orchestrator.cli.views.control import request

    return request("pause", run, batch, data, json=json, everything=everything)


def resume(
    run: options.MaybeRunId = None,
    batch: options.OfBatch = None,
    everything: WholeFleet = False,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> int:
    """Resume a paused run, batch or fleet."""
    from stepfleet.orchestrator.cli.views.control import request

    return request("resume", run, batch, data, json=json, everything=everything)


def purge(
    batch: options.OfBatch = None,
    status: Annotated[
        list[str] | None,
        typer.Option("--status", "-s", metavar="STATUS", help="Only runs with this status."),
    ] = None,
    older_than: Annotated[
        str,
        typer.Option("--older-than", metavar="TIME", help="Only runs that ended so long ago: 2d."),
    ] = "0",
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only count them.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Remove ended runs before their retention is over; works while Redis is full."""
    from stepfleet.orchestrator.cli.views.control import purge_runs, seconds_of

    runs = {
        "batch": batch,
        "statuses": status or (),
        "older_than": seconds_of(older_than, "--older-than"),
    }
    purge_runs(runs, data, dry_run=dry_run, yes=yes, json=json)
