"""The command scale: how many workers there should be, for people, scripts and autoscalers."""

from typing import Annotated

import typer

from stepfleet.orchestrator.cli import options
from stepfleet.orchestrator.cli.fleet import with_fleet
from stepfleet.orchestrator.cli.terminal import count, print_json, screen
from stepfleet.orchestrator.store.fleet.scale import ScaleSignal

_MOST_SLOTS = 100_000
_CAUSES = {
    "limits": "for limits",
    "circuits": "for services that are out",
    "people": "for people",
    "children": "for runs that they have started",
    "tools": "for tools of other queues",
    "runs": "for the ends of other runs",
    "delays": "for more than a minute",
}


def scale(
    *,
    queue: Annotated[
        str | None, typer.Option("--queue", help="A queue of tools; else that of steps.")
    ] = None,
    slots_per_worker: Annotated[
        int | None,
        typer.Option(
            "--slots-per-worker",
            min=1,
            max=_MOST_SLOTS,
            help="Slots of a new worker; else as those alive have, or the settings.",
        ),
    ] = None,
    beside: Annotated[
        int,
        typer.Option("--beside", min=0, help="Workers that are there anyway: none of the wanted."),
    ] = 0,
    wanted: Annotated[
        bool, typer.Option("--wanted", help="Print the number of workers only.")
    ] = False,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Show how many workers there should be, by what they could do now.

    What waits for limits, services, people or other runs needs no worker.
    """
    found = with_fleet(
        data,
        lambda fleet: fleet.scale(queue=queue, slots_per_worker=slots_per_worker, beside=beside),
    )
    if wanted:
        typer.echo(found.wanted)
    elif json:
        print_json(found.to_dict())
    else:
        screen().print(sentence(found), soft_wrap=True, highlight=False, markup=False)


def sentence(found: ScaleSignal) -> str:
    """Return the signal in words."""
    workers = "1 worker" if found.wanted == 1 else f"{count(found.wanted)} workers"
    now = count(found.queued + found.due_soon, guessed=found.estimated)
    in_hand = count(found.in_hand, guessed=found.estimated)
    can = f"{now} could go on now or within a minute, {in_hand} in hand"
    parts = [f"{workers} wanted, {count(found.workers)} alive: {can}"]
    for cause, many in found.waits.items():
        shown, verb = count(many, guessed=found.estimated), "waits" if many == 1 else "wait"
        other = f"{shown} paused" if cause == "paused" else f"{shown} {verb} for other things"
        parts.append(f"{shown} {verb} {_CAUSES[cause]}" if cause in _CAUSES else other)
    return "; ".join(parts)
