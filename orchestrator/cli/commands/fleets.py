"""`stepfleet up`, `worker`, `flower`, `doctor`, `cache`, `costs`."""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs: `--help` answers at once

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from stepfleet.orchestrator.cli import options


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
    from stepfleet.orchestrator.cli.local.up import run_up

    plan = FleetPlan(agents, workers, slots)
    plan = plan.simulating(simulate, simulate_latency, simulate_faults)
    run_up(plan, data, with_flower=with_flower)


def worker(
    agents: options.AgentsRef,
    *,
    slots: options.Slots = None,
    pool: Annotated[
        str,
        typer.Option("--pool", "-P", help="asyncio (made for steps), prefork, threads or solo."),
    ] = "asyncio",
    concurrency: Annotated[
        int | None,
        typer.Option("--concurrency", "-c", min=1, help="The same as --slots; Celery's name."),
    ] = None,
    autoscale: Annotated[
        str | None,
        typer.Option(metavar="MAX,MIN", help="Steps at once: as many as needed within these."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", "-n", help="Node name, unique.")] = None,
    queue: Annotated[
        list[str] | None,
        typer.Option(
            "--queue",
            "-Q",
            metavar="NAME",
            help="Serve this queue of tools instead of steps; repeat it, or use commas.",
        ),
    ] = None,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Become one Celery worker, in the foreground, until SIGTERM or Ctrl-C."""
    from stepfleet.orchestrator.cli.local.worker import become_worker
    from stepfleet.orchestrator.cli.local.worker_command import (
        WorkerOptions,
        checked_autoscale,
        named_queues,
        slots_of,
    )

    wanted = slots_of(pool, concurrency or slots)
    queues = named_queues(queue or ())
    become_worker(
        WorkerOptions(
            agents, wanted, pool, name, queues=queues, autoscale=checked_autoscale(autoscale)
        ),
        data,
    )


def flower(
    port: Annotated[
        int,
        typer.Option(
            "--port", envvar=options.FLOWER_PORT, min=0, max=65_535, help="0: any free port."
        ),
    ] = options.DEFAULT_FLOWER_PORT,
    address: Annotated[str, typer.Option("--address", help="Where to listen.")] = "127.0.0.1",
    basic_auth: options.BasicAuth = None,
    flower_db: Annotated[
        Path | None,
        typer.Option(
            "--flower-db",
            envvar="STEPFLEET_FLOWER_DB",
            help="Keep the tasks in this file over restarts of Flower.",
        ),
    ] = None,
    content: Annotated[
        bool | None,
        typer.Option(
            "--content/--no-content",
            help="Show texts of models and tools to users with the password; else as the settings.",
            show_default=False,
        ),
    ] = None,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Run Flower on the fleet's broker: runs, batches, workers, costs, approvals.

    Listens on this machine only; another address needs --basic-auth. As in Flower itself, the
    HTTP API is open only with --basic-auth.
    """
    from stepfleet.orchestrator.cli.local.flower import serve_flower

    serve_flower(port, address, basic_auth, data, flower_db, content=content)


def workers(json: options.Json = False, data: options.Data = options.DATA_FOLDER) -> None:
    """Show the workers: their versions, memory and queues, and whether they are stopping."""
    from stepfleet.orchestrator.cli.setup.with_fleet import show
    from stepfleet.orchestrator.cli.views.fleet import workers_picture

    show(
        data,
        lambda fleet: fleet.overview(),
        lambda found: workers_picture(found.workers),
        json=json,
        as_data=lambda found: [one.to_dict() for one in found.workers],
    )


def doctor(
    agents: options.MaybeAgentsRef = None,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> int:
    """Check the set-up, and name the fix for each problem. Sends no prompt."""
    from stepfleet.orchestrator.cli.doctor.doctor import diagnose

    return diagnose(agents, data, json=json)


def cache_stats(json: options.Json = False, data: options.Data = options.DATA_FOLDER) -> None:
    """Show entries, size, hits and misses of the response cache, in total and by model."""
    from stepfleet.orchestrator.cli.setup.with_fleet import show
    from stepfleet.orchestrator.cli.views.fleet import statistics_picture

    show(
        data,
        lambda fleet: fleet.cache.statistics(),
        statistics_picture,
        json=json,
        as_data=lambda found: {**found.to_dict(), "hit_rate": found.hit_rate},
    )


def cache_clear(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="MODEL", help="Only this model's, provider:name."),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option("--key", "-k", metavar="KEY", help="Only this entry, a step's cache.key."),
    ] = None,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Remove cached responses: all of them, one model's, or one entry."""
    from stepfleet.orchestrator.cli.setup.with_fleet import show

    show(
        data,
        lambda fleet: fleet.cache.clear(key=key, model=model),
        lambda dropped: f"{dropped:,} {'entry' if dropped == 1 else 'entries'} dropped",
        json=json,
        as_data=lambda dropped: {"dropped": dropped},
    )


def costs(
    *,
    by: Annotated[
        str,
        typer.Option(
            "--by", metavar="KEYS", help="day, tenant, batch, agent, model, lane, status."
        ),
    ] = "",
    since: Annotated[
        str | None, typer.Option("--since", metavar="DAY", help="As 2026-11-22, or 7d ago (UTC).")
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", metavar="DAY", help="The last day, as --since.")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="NAME", help="Of this tenant; '': of none.")
    ] = None,
    batch: Annotated[
        str | None, typer.Option("--batch", "-b", metavar="ID", help="Of this batch.")
    ] = None,
    agent: Annotated[
        str | None, typer.Option("--agent", metavar="NAME", help="Of this agent.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="NAME", help="Of this model.")
    ] = None,
    lane: Annotated[
        str | None,
        typer.Option("--lane", metavar="LANE", help="Of this tier: standard, flex, priority, ..."),
    ] = None,
    status: Annotated[
        str | None,
        typer.Option("--status", metavar="STATUS", help="committed, lost, ambiguous or cached."),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option("--run", metavar="RUN", help="The calls of this run, or line, one by one."),
    ] = None,
    lines: Annotated[
        bool, typer.Option("--lines", help="Single calls, of runs that are kept (CSV, JSON).")
    ] = False,
    output_format: Annotated[
        Literal["table", "csv", "json", "jsonl"], typer.Option("--format", help="Of the output.")
    ] = "table",
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Show what model calls have cost: also those whose answers were lost, and what was saved.

    The sums stay when their runs are gone. Lines that may have been paid are shown apart.
    """
    from datetime import UTC, datetime

    from stepfleet.orchestrator.cli.setup.with_fleet import with_fleet
    from stepfleet.orchestrator.cli.views.costs import day_given, print_costs, print_lines

    today = datetime.now(UTC).date()
    which: Any = {"tenant": tenant, "batch": batch, "agent": agent, "model": model}
    days = {
        "since": day_given(since, "--since", today),
        "until": day_given(until, "--until", today),
    }
    which |= {"lane": lane, "status": status, **days}
    if lines or run:
        with_fleet(data, lambda fleet: print_lines(fleet, run, which, output_format))
        return
    print_costs(with_fleet(data, lambda fleet: fleet.costs(by, **which)), output_format)
