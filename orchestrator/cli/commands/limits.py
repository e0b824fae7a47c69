"""`stepfleet limits show`, `set`, `clear`."""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs: `--help` answers at once

from typing import TYPE_CHECKING, Annotated

import typer

from stepfleet.orchestrator.cli import options

if TYPE_CHECKING:
    from stepfleet.orchestrator.client.fleet import AsyncFleet

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="openai:gpt-4o-mini, 'openai:*', tenant:acme, 'batch:*', agent:clerk."
    ),
]


def limits_show(json: options.Json = False, data: options.Data = options.DATA_FOLDER) -> None:
    """Show the limits of the fleet, what is used of them, and how many steps wait."""
    from stepfleet.orchestrator.cli.setup.with_fleet import show
    from stepfleet.orchestrator.cli.views.limits import picture

    show(
        data,
        lambda fleet: fleet.limits.use(),
        picture,
        json=json,
        as_data=lambda found: [one.to_dict() for one in found],
    )


def limits_set(
    name: Name,
    fields: Annotated[
        list[str],
        typer.Argument(
            metavar="FIELD=VALUE...",
            help="requests_per_minute=3000 in_flight=500; FIELD= ends one.",
        ),
    ],
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Set fields of a limit, for the whole fleet and at once."""
    from stepfleet.orchestrator.cli.setup.with_fleet import show
    from stepfleet.orchestrator.cli.views.limits import words
    from stepfleet.orchestrator.limits.limit import parsed_field

    given = dict(map(parsed_field, fields))
    show(
        data,
        lambda fleet: fleet.limits.set(name, **given),
        lambda limit: f"{name}: {words(limit)}",
        json=json,
        as_data=lambda limit: {name: limit.model_dump(exclude_unset=True)},
    )


def limits_clear(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME...")] = None,
    every: Annotated[bool, typer.Option("--all", help="Remove all limits.")] = False,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Remove limits: those named, or all."""
    from stepfleet.orchestrator.cli.setup.with_fleet import show
    from stepfleet.orchestrator.errors import ConfigurationError

    if bool(names) == every:
        raise ConfigurationError("name the limits to remove, or pass --all")
    given = sorted(set(names or ()))

    async def clear(fleet: "AsyncFleet") -> int:
        gone = await fleet.limits.clear(*given)
        if gone < len(given):
            named = f"there is no limit {given[0]!r}"
            if len(given) > 1:
                named = f"of {len(given):,} limits {len(given) - gone:,} did not exist"
            raise ConfigurationError(f"{named}; {gone:,} removed; stepfleet limits show has all")
        return gone

    show(
        data,
        clear,
        lambda gone: f"{gone:,} {'limit' if gone == 1 else 'limits'} removed",
        json=json,
        as_data=lambda gone: {"removed": gone},
    )
