"""One object per event loop: clients belong to the loop that uses them first."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class OnePerLoop(Generic[T]):
    """Makes an object at its first use in a loop and returns the same one from then on."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: WeakKeyDictionary[asyncio.AbstractEventLoop, T] = WeakKeyDictionary()

    def get(self) -> T:
        """Return this loop's object."""
        loop = asyncio.get_running_loop()
        found = self._made.get(loop)
        if found is None:
            found = self._made[loop] = self._make()
        return found

    async def close(self, close: Callable[[T], Awaitable[None]]) -> None:
        """Close this loop's object, if it has one."""
        found = self._made.pop(asyncio.get_running_loop(), None)
        if found is not None:
            await close(found)
