"""`stepfleet schedule add`, `list`, `show`, `pause`, `resume`, `remove`, `run-now`."""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs: `--help` answers at once

from functools import partial
from typing import Annotated, Literal

import typer

from stepfleet.orchestrator.cli import options

Name = Annotated[str, typer.Argument(metavar="NAME", help="The schedule.")]


def schedule_add(
    name: Name,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="The lines of each batch; - is stdin.")
    ],
    *,
    cron: Annotated[
        str,
        typer.Option("--cron", help="'0 6 * * 1-5', @daily, or '@every 15m'."),
    ],
    tz: Annotated[str, typer.Option("--tz", help="Time zone, as Europe/Berlin.")] = "UTC",
    agents: options.MaybeAgentsRef = None,
    agent: options.AgentName = None,
    jitter: Annotated[
        str, typer.Option("--jitter", help="Delays each tick by up to this much, as 5m.")
    ] = "0s",
    missed: Annotated[
        Literal["newest", "all", "skip"],
        typer.Option("--missed", help="Ticks to make up that came while no worker was up."),
    ] = "newest",
    overlap: Annotated[
        Literal["allow", "skip"],
        typer.Option("--overlap", help="A tick while the batch before it is open."),
    ] = "allow",
    paused: Annotated[bool, typer.Option("--paused", help="Add it, and let it rest.")] = False,
    tenant: options.Tenant = None,
    priority: options.BatchPriority = None,
    limit: options.BatchLimit = None,
    input_kind: options.InputKind = None,
    input_field: options.InputField = None,
    id_field: options.IdField = None,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Submit a file as a batch again and again; its lines are stored with the schedule."""
    from stepfleet.orchestrator.cli.results.input_file import InputForm
    from stepfleet.orchestrator.cli.views.control import seconds_of
    from stepfleet.orchestrator.cli.views.schedules import add

    form = InputForm(input_kind, input_field, id_field, False, tenant, priority, limit)
    chosen = {
        **form.for_batch(),
        "cron": cron,
        "tz": tz,
        "jitter": seconds_of(jitter, "--jitter"),
        "missed": missed,
        "overlap": overlap,
        "paused": paused,
    }
    add(name, file, (agents, agent), chosen, data, json=json)


def schedule_list(json: options.Json = False, data: options.Data = options.DATA_FOLDER) -> None:
    """List the schedules with their last and next ticks."""
    from stepfleet.orchestrator.cli.setup.with_fleet import show
    from stepfleet.orchestrator.cli.views.schedules import read_all, table

    show(
        data,
        read_all,
        table,
        json=json,
        as_data=lambda found: [one.to_dict() for one in found],
    )


def schedule_show(
    name: Name, json: options.Json = False, data: options.Data = options.DATA_FOLDER
) -> None:
    """Show a schedule: what it submits, when, and what came of it."""
    from stepfleet.orchestrator.cli.setup.with_fleet import show
    from stepfleet.orchestrator.cli.views.schedules import picture, read

    show(data, partial(read, name), picture, json=json)


def schedule_pause(
    name: Name, json: options.Json = False, data: options.Data = options.DATA_FOLDER
) -> None:
    """Let a schedule rest; its ticks are left out."""
    from stepfleet.orchestrator.cli.setup.with_fleet import show

    text = f"{name}: paused"
    show(data, lambda fleet: fleet.schedules.pause(name), lambda _: text, json=json)


def schedule_resume(
    name: Name, json: options.Json = False, data: options.Data = options.DATA_FOLDER
) -> None:
    """Let a paused schedule go on with its next tick."""
    from stepfleet.orchestrator.cli.setup.with_fleet import show
    from stepfleet.orchestrator.cli.views.schedules import next_words

    show(data, lambda fleet: fleet.schedules.resume(name), next_words, json=json)


def schedule_remove(name: Name, data: options.Data = options.DATA_FOLDER) -> None:
    """Remove a schedule; its batches stay."""
    from stepfleet.orchestrator.cli.setup.with_fleet import with_fleet
    from stepfleet.orchestrator.cli.terminal.output import print_text

    with_fleet(data, lambda fleet: fleet.schedules.remove(name))
    print_text(f"{name}: removed")


def schedule_run_now(name: Name, data: options.Data = options.DATA_FOLDER) -> None:
    """Submit a schedule's batch now, beside its ticks."""
    from stepfleet.orchestrator.cli.setup.with_fleet import with_fleet
    from stepfleet.orchestrator.cli.terminal.output import print_text
    from stepfleet.orchestrator.client.fleet import AsyncFleet

    async def submit(fleet: AsyncFleet) -> str:
        return (await fleet.schedules.run_now(name)).id

    print_text(f"{name}: batch {with_fleet(data, submit)}")
