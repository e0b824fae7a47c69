"""Opens the fleet for one command and closes it again."""

import asyncio
from collections.abc import Awaitable, Callable
from operator import methodcaller
from pathlib import Path
from typing import Any, TypeVar

from rich.console import RenderableType

from stepfleet.orchestrator.cli.setup.data_folder import known_redis
from stepfleet.orchestrator.cli.setup.reaching import reach, warn_of
from stepfleet.orchestrator.cli.terminal.output import print_either
from stepfleet.orchestrator.client.fleet import AsyncFleet

T = TypeVar("T")


def with_fleet(
    data: Path,
    work: Callable[[AsyncFleet], Awaitable[T]],
    *,
    warn: bool = False,
    waits: bool = False,
) -> T:
    """Return what `work` returns for the fleet; `warn` prints a warning about an unsafe Redis.

    Work that `waits` for runs also waits for an absent Redis, for the settings' `patience`.
    Raises `ConfigurationError` or `StoreError`, with the fix, where there is no usable Redis.
    """
    with known_redis(data) as settings:
        # Checked either way: an unreachable Redis is reported with its fix within seconds.
        patience = settings.patience if waits else 0.0
        check = warn_of if warn else reach
        check(settings.store, patience=patience, prefix=settings.prefix)

        async def opened() -> T:
            async with AsyncFleet(settings=settings) as fleet:
                return await work(fleet)

        return asyncio.run(opened())


def show(
    data: Path,
    read: Callable[[AsyncFleet], Awaitable[T]],
    picture: Callable[[T], RenderableType],
    *,
    json: bool,
    as_data: Callable[[T], Any] = methodcaller("to_dict"),
) -> None:
    """Print what `read` returns for the fleet: its `picture`, or its data as JSON."""
    found = with_fleet(data, read)
    print_either(found, picture, json=json, as_data=as_data)
