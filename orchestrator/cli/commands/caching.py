"""`stepfleet cache`: `stats`, `clear`."""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs: `--help` answers at once

from typing import Annotated

import typer

from stepfleet.orchestrator.cli import options


def stats(json: options.Json = False, data: options.Data = options.DATA_FOLDER) -> None:
    """Show entries, size, hits and misses of the response cache, in total and by model."""
    from stepfleet.orchestrator.cli.setup.with_fleet import show
    from stepfleet.orchestrator.cli.views.cache import statistics_picture

    show(
        data,
        lambda fleet: fleet.cache.statistics(),
        statistics_picture,
        json=json,
        as_data=lambda found: {**found.to_dict(), "hit_rate": found.hit_rate},
    )


def clear(
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
