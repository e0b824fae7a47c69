"""`stepfleet run`."""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs: `--help` answers at once

from pathlib import Path
from typing import Annotated

import typer

from stepfleet.orchestrator.cli import options
from stepfleet.orchestrator.cli.terminal import exit_codes


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(run)


def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Inputs, JSONL: a run per line.")],
    *,
    agents: options.AgentsRef,
    agent: options.AgentName = None,
    out: options.Out = None,
    workers: Annotated[
        int,
        typer.Option(
            "--workers", "-w", min=0, max=256, help="Worker processes; 0 if others do the work."
        ),
    ] = 1,
    slots: options.Slots = None,
    simulate: options.Simulate = None,
    simulate_latency: options.SimulateLatency = None,
    simulate_faults: options.SimulateFaults = None,
    data: options.Data = options.DATA_FOLDER,
    skip_invalid: options.SkipInvalid = False,
    output_format: options.OutFormat = "auto",
    json: options.Json = False,
) -> None:
    """Run a file of inputs: Redis, workers, progress and results, all in one command.

    Uses the Redis in STEPFLEET_REDIS_URL, or starts a private one in the data folder. Results
    are written as runs end. Interrupted (Ctrl-C once: an orderly stop), the same command goes
    on where it stopped and adds only the results that are missing. Once its batch is done, it
    begins a new one, unless its results file still exists.
    """
    from stepfleet.orchestrator.cli.local.fleet import FleetPlan
    from stepfleet.orchestrator.cli.local.simulation import simulated_as
    from stepfleet.orchestrator.cli.run.run import RunPlan, run_file

    simulated = simulated_as(simulate, simulate_latency, simulate_faults)
    plan = RunPlan(
        file=file,
        agent=agent,
        fleet=FleetPlan(agents, workers, slots, simulated),
        out=out,
        data=data,
        skip_invalid=skip_invalid,
        output_format=output_format,
        json=json,
    )
    exit_codes.end(run_file(plan))
