"""`stepfleet doctor`."""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs: `--help` answers at once

import typer

from stepfleet.orchestrator.cli import options
from stepfleet.orchestrator.cli.terminal import exit_codes


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(doctor)


def doctor(
    agents: options.MaybeAgentsRef = None,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Check the set-up, and name the fix for what is wrong. Sends no prompt."""
    from stepfleet.orchestrator.cli.doctor.doctor import diagnose

    exit_codes.end(diagnose(agents, data, json=json))
