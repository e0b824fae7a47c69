"""What is costly to read, and is read once for all who want it within some seconds."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """Answers by their questions: each is as old as `seconds` at the most, and `most` are kept.

    Errors are not kept. One who gives up takes nothing away from others that wait.
    """

    def __init__(self, seconds: float, most: int = 1) -> None:
        self._seconds = seconds
        self._most = most
        self._found: dict[Hashable, tuple[float, asyncio.Task[T]]] = {}

    async def get(self, key: Hashable, read: Callable[[], Awaitable[T]]) -> T:
        """Return what `read` returns now, or returned lately. Raises what it raises."""
        at, task = self._found.get(key, (0.0, None))
        is_old = time.monotonic() - at > self._seconds
        if task is None or (task.done() and (is_old or task.cancelled() or task.exception())):
            self._found.pop(key, None)
            while len(self._found) >= self._most:
                del self._found[next(iter(self._found))]
            task = asyncio.ensure_future(_awaited(read))
            self._found[key] = (time.monotonic(), task)
        return await asyncio.shield(task)


async def _awaited(read: Callable[[], Awaitable[T]]) -> T:
    return await read()
