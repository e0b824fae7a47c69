"""Opens the fleet for one command and closes it again."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from stepfleet.orchestrator.cli.setup.data_folder import known_redis
from stepfleet.orchestrator.cli.setup.redis_facts import ask, warn_of
from stepfleet.orchestrator.client.fleet import AsyncFleet

T = TypeVar("T")


def with_fleet(
    data: Path,
    work: Callable[[AsyncFleet], Awaitable[T]],
    *,
    warn: bool = False,
    waits: bool = False,
) -> T:
    """Return what `work` returns for the fleet at hand; `warn` tells of an unsafe Redis.

    Work that `waits` for runs waits for a Redis that is away too, for the settings' `patience`.
    Raises `ConfigurationError` or `StoreError`, with the fix, where there is no usable Redis.
    """
    with known_redis(data) as settings:
        # Asked either way: who cannot be reached is told with the fix within seconds.
        patience = settings.patience if waits else 0.0
        (warn_of if warn else ask)(settings.store, patience=patience)

        async def opened() -> T:
            async with AsyncFleet(settings=settings) as fleet:
                return await work(fleet)

        return asyncio.run(opened())
