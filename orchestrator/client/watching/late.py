"""What the error of a wait says that was too short: how far it is, and what is waited for."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress

from redis.exceptions import RedisError

from stepfleet.orchestrator.client.watching.standstill import READ_SECONDS
from stepfleet.orchestrator.errors import AgentException

_NAMED = 10
"""Runs before a run that are named."""


@asynccontextmanager
async def explained_when_late(
    about: str, seconds: float | None, why: Callable[[], Awaitable[str]]
) -> AsyncGenerator[None, None]:
    """Raise `TimeoutError` after `seconds` that says what `why` does, which has a second for it."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        text = f"{about} has not ended after {seconds:g} s"
        with suppress(TimeoutError, AgentException, RedisError):
            async with asyncio.timeout(READ_SECONDS):
                text += f"; {await why()}"
        raise TimeoutError(text) from None


def begins_after(before: Mapping[str, str]) -> str:
    """Return for which runs one waits before it begins: ids and statuses. Pure."""
    named = ", ".join(f"{run} ({status})" for run, status in list(before.items())[:_NAMED])
    more = f" and {len(before) - _NAMED:,} more" if len(before) > _NAMED else ""
    return f"begins when these have ended: {named}{more}"
