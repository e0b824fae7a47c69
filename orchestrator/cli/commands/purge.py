"""`stepfleet purge`."""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs: `--help` answers at once

from typing import Annotated

import typer

from stepfleet.orchestrator.cli import options
from stepfleet.orchestrator.cli.terminal import exit_codes


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(purge)


def purge(
    batch: options.OfBatch = None,
    status: Annotated[
        list[str] | None,
        typer.Option("--status", "-s", metavar="STATUS", help="Only runs that ended so."),
    ] = None,
    older_than: Annotated[
        str,
        typer.Option("--older-than", metavar="TIME", help="Only runs that ended so long ago: 2d."),
    ] = "0",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Only say how many it would be.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Remove ended runs before their retention is over; works while Redis is full."""
    from stepfleet.orchestrator.cli.views.purge import Wanted, purge_runs

    wanted = Wanted(batch, tuple(status or ()), older_than, dry_run=dry_run, json=json)
    exit_codes.end(purge_runs(wanted, data, yes=yes))
