"""Opens the fleet for one command and closes it again."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from stepfleet.orchestrator.cli.output import notice
from stepfleet.orchestrator.cli.places import known_redis
from stepfleet.orchestrator.cli.redis_facts import ask, worries
from stepfleet.orchestrator.fleet import AsyncFleet

T = TypeVar("T")


def with_fleet(data: Path, work: Callable[[AsyncFleet], Awaitable[T]], *, warn: bool = False) -> T:
    """Return what `work` returns for the fleet at hand; `warn` tells of an unsafe Redis.

    Raises `ConfigurationError` or `StoreError`, with the fix, where there is no usable Redis.
    """
    with known_redis(data) as settings:
        facts = ask(settings.store)
        for worry in worries(facts) if warn else ():
            notice(f"WARNING: {worry.text}")

        async def opened() -> T:
            async with AsyncFleet(settings=settings) as fleet:
                return await work(fleet)

        return asyncio.run(opened())
