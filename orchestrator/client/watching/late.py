"""What the error of a wait says that was too short: how far it is, and what is waited for."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from redis.exceptions import RedisError

from stepfleet.orchestrator.client.watching.standstill import READ_SECONDS
from stepfleet.orchestrator.errors import AgentException

_NAMED = 10
"""Runs before a run that are named."""


async def late(
    about: str, seconds: float | None, why: Callable[[], Awaitable[str]]
) -> TimeoutError:
    """Return the error of a wait of that many `seconds`; `why` is asked for a second at most."""
    text = f"{about} has not ended after {seconds or 0.0:g} s"
    with suppress(TimeoutError, AgentException, RedisError):
        async with asyncio.timeout(READ_SECONDS):
            if found := await why():
                text += f"; {found}"
    return TimeoutError(text)


def begins_after(before: Mapping[str, str]) -> str:
    """Return for which runs one waits before it begins: ids and statuses. Pure."""
    named = ", ".join(f"{run} ({status})" for run, status in list(before.items())[:_NAMED])
    more = f" and {len(before) - _NAMED:,} more" if len(before) > _NAMED else ""
    return f"begins when these have ended: {named}{more}"
