"""`stepfleet cache`: `stats`, `clear`."""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs: `--help` answers at once

from typing import Annotated

import typer

from stepfleet.orchestrator.cli import options


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(
        name="cache", no_args_is_help=True, help="The response cache: what it holds, clear it."
    )
    group.command()(stats)
    group.command()(clear)
    app.add_typer(group)


def stats(json: options.Json = False, data: options.Data = options.DATA_FOLDER) -> None:
    """Show entries, size, hits and misses of the response cache, in all and by model."""
    from stepfleet.orchestrator.cli.views.cache import print_statistics

    print_statistics(data, json=json)


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
    """Forget answers: all of them, one model's, or one."""
    from stepfleet.orchestrator.cli.views.cache import clear_cache

    clear_cache(model, key, data, json=json)
