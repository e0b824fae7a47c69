"""`stepfleet up`, `worker`, `flower`."""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs: `--help` answers at once

from typing import Annotated

import typer

from stepfleet.orchestrator.cli import options
from stepfleet.orchestrator.cli.terminal import exit_codes


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(up)
    app.command()(worker)
    app.command()(flower)


def up(
    *,
    agents: options.AgentsRef,
    workers: options.Workers = 1,
    slots: options.Slots = None,
    with_flower: Annotated[bool, typer.Option("--flower", help="Start Flower as well.")] = False,
    simulate: options.Simulate = None,
    simulate_latency: options.SimulateLatency = None,
    simulate_faults: options.SimulateFaults = None,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Run a local fleet until Ctrl-C: Redis and workers.

    Commands in other terminals find it by the data folder, or by STEPFLEET_REDIS_URL.
    """
    from stepfleet.orchestrator.cli.local.fleet import FleetPlan
    from stepfleet.orchestrator.cli.local.simulation import simulated_as
    from stepfleet.orchestrator.cli.local.up import stand

    simulated = simulated_as(simulate, simulate_latency, simulate_faults)
    plan = FleetPlan(agents, workers, slots, simulated)
    exit_codes.end(stand(plan, data, with_flower=with_flower))


def worker(
    agents: options.AgentsRef,
    slots: options.Slots = None,
    pool: Annotated[
        str,
        typer.Option(
            "--pool", "-P", help="asyncio is made for steps; prefork, threads, solo work."
        ),
    ] = "asyncio",
    concurrency: Annotated[
        int | None,
        typer.Option("--concurrency", "-c", min=1, help="The same as --slots, Celery's word."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", "-n", help="Node name, unique.")] = None,
    queue: Annotated[
        list[str] | None,
        typer.Option(
            "--queue",
            "-Q",
            metavar="NAME",
            help="Serve this queue of tools instead of steps; again, or with commas, for several.",
        ),
    ] = None,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Become one Celery worker, in the foreground, until SIGTERM or Ctrl-C."""
    from stepfleet.orchestrator.cli.local.pools import slots_of
    from stepfleet.orchestrator.cli.local.queues import asked_queues
    from stepfleet.orchestrator.cli.local.worker import become_worker
    from stepfleet.orchestrator.cli.local.worker_command import WorkerOptions

    options_of_it = WorkerOptions(
        agents, slots_of(pool, concurrency or slots), pool, name, queues=asked_queues(queue or ())
    )
    become_worker(options_of_it, data)


def flower(
    port: Annotated[
        int,
        typer.Option(
            "--port", envvar=options.FLOWER_PORT, min=0, max=65_535, help="0: any free port."
        ),
    ] = options.DEFAULT_FLOWER_PORT,
    address: Annotated[str, typer.Option("--address", help="Where to listen.")] = "127.0.0.1",
    basic_auth: options.BasicAuth = None,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Run Flower on the fleet's broker: steps by name, workers, failures.

    Listens on this machine only; on another address it wants --basic-auth. Its HTTP API is
    open only with --basic-auth, as in Flower itself.
    """
    from stepfleet.orchestrator.cli.commands.flower import serve_flower

    serve_flower(port, address, basic_auth, data)
