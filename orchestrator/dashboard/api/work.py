"""Work on whole files, in threads with loops and connections of their own: not in Flower's loop.

Knows neither requests nor what the work is.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any, TypeVar

from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.errors import StoreError

MOST = 4
"""Files that are received, submitted or sent at the same time."""

PATIENCE = 20.0
"""Seconds for which a call to a Redis that is away is repeated: nobody waits for the page."""

T = TypeVar("T")


class Work:
    """The places for work on files, of which there are few."""

    def __init__(self) -> None:
        self._taken = 0

    @contextmanager
    def place(self) -> Iterator[None]:
        """Take a place. Raises `StoreError` where none is free."""
        if self._taken >= MOST:
            msg = f"{MOST} files are being uploaded or downloaded here; try again in a moment"
            raise StoreError(msg)
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1

    async def do(self, fleet: AsyncFleet, what: Callable[[AsyncFleet], Awaitable[T]]) -> T:
        """Return what `what` returns for a fleet as `fleet`, in a thread of its own.

        The thread ends with the process: what it leaves is as after a crash.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def deliver(put: Callable[[Any], None], value: Any) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(lambda: None if done.done() else put(value))

        async def work() -> T:
            known = fleet.settings
            patient = known.model_copy(update={"patience": max(known.patience, PATIENCE)})
            async with AsyncFleet(settings=patient) as own:
                return await what(own)

        def run() -> None:
            try:
                found = asyncio.run(work())
            except BaseException as error:  # noqa: BLE001 - the request reports it
                deliver(done.set_exception, error)
            else:
                deliver(done.set_result, found)

        Thread(target=run, name="stepfleet-file", daemon=True).start()
        return await done
