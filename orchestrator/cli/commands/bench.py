"""`stepfleet bench`."""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs: `--help` answers at once

from typing import Annotated

import typer

from stepfleet.orchestrator.cli import options
from stepfleet.orchestrator.cli.terminal import exit_codes

CONCURRENT = (1_000, 10_000, 100_000)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(bench)


def bench(
    *,
    runs: Annotated[int, typer.Option("--runs", "-n", min=1, help="Runs, all at once.")] = 500,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Model calls of each run.")] = 5,
    latency: Annotated[
        str,
        typer.Option(
            "--latency",
            metavar="SECONDS",
            help="Of a model call: 0.5, 0.2-1.5 (evenly), p50=1,p99=8 (log-normal); and "
            ",tail=0.02:30 (that share takes 30 s).",
        ),
    ] = "p50=1,p99=4",
    tools: Annotated[
        float, typer.Option("--tools", min=0, max=1, help="Share of calls that ask for a tool.")
    ] = 1.0,
    tool_seconds: Annotated[
        float, typer.Option("--tool-seconds", min=0, help="How long a tool takes, without CPU.")
    ] = 0.0,
    faults: Annotated[
        float, typer.Option("--faults", min=0, max=1, help="Share of calls that fail for a retry.")
    ] = 0.0,
    workers: options.Workers = 1,
    slots: options.Slots = None,
    concurrent: Annotated[
        list[int] | None,
        typer.Option("--concurrent", min=1, help="Estimate workers for so many runs at once."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of what is drawn.")] = 0,
    json: options.Json = False,
) -> None:
    """Measure a fleet on this machine with a simulated provider: no key, no network.

    Uses a private Redis for it, or the one in STEPFLEET_REDIS_URL where no worker runs. Then
    estimates the workers that more runs at once would need.
    """
    from stepfleet.orchestrator.cli.bench.latencies import Latencies
    from stepfleet.orchestrator.cli.bench.runner import BenchPlan, bench_fleet
    from stepfleet.orchestrator.cli.bench.workload import Workload

    load = Workload(runs, steps, Latencies.parse(latency), tools, tool_seconds, seed)
    asked = tuple(concurrent or CONCURRENT)
    exit_codes.end(bench_fleet(BenchPlan(load, workers, slots, faults, asked, json)))
