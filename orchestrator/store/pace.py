"""How many calls of a sweep travel together, so that Redis serves everybody else between them.

A sweep applies one thing to thousands of runs. Redis runs all calls of a pipeline before it serves
others, so they would wait for as long as these take; how long that is depends on the runs. A pace
measures it and adapts. Knows nothing of what the calls do.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store.lua import ScriptCall, loaded, run_script

TARGET_SECONDS = 0.003
"""How long Redis is to be busy with one group; others wait for about that long."""
FIRST, MOST = 16, 500
AT_ONCE = 40
"""Calls of `in_groups` that are under way together; each takes Redis up to 0.1 ms."""

T = TypeVar("T")
R = TypeVar("R")


class SweepPace:
    """The pace of one sweep: `size` is how many items its next group has."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.size = FIRST

    def groups(self, items: Sequence[T]) -> Iterator[Sequence[T]]:
        """Yield the items group by group, each as large as the pace allows by then."""
        at = 0
        while at < len(items):
            group = items[at : at + self.size]
            yield group
            at += len(group)

    async def send(self, calls: Sequence[ScriptCall], items: int | None = None) -> list[Any]:
        """Return the replies to calls for `items` (default: one each), which travel together.

        A call that fails, as where a server has lost its scripts, is made again by itself. Raises
        as `run_script` does.
        """
        replies, seconds = await self._connection.timed(*(loaded(*call) for call in calls))
        self._adapt(items or len(calls), seconds)
        return [
            await run_script(self._connection, *call) if isinstance(reply, BaseException) else reply
            for call, reply in zip(calls, replies, strict=True)
        ]

    def _adapt(self, items: int, seconds: float) -> None:
        fits = round(items * TARGET_SECONDS / max(seconds, 1e-6))
        self.size = max(1, min(fits, 2 * self.size, MOST))


async def in_groups(items: Sequence[T], call: Callable[[T], Awaitable[R]]) -> list[R]:
    """Return what `call` returns for each item, in order; a bounded number is under way."""
    found: list[R] = []
    for at in range(0, len(items), AT_ONCE):
        found += await asyncio.gather(*map(call, items[at : at + AT_ONCE]))
    return found
