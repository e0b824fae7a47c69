"""One event loop in a thread of its own, for plain code that calls asynchronous code."""

import asyncio
import contextlib
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
_CLOSING_SECONDS = 30.0


class Portal:
    """One event loop in a daemon thread, for calls from anywhere else.

    Ends, after `closing`, when it is closed, collected, or the interpreter ends.
    """

    def __init__(self, closing: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(
            target=self._loop.run_forever, name="stepfleet-client", daemon=True
        )
        thread.start()
        self.close = weakref.finalize(self, _end, self._loop, thread, closing)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns; an interrupt of the caller cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def each(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """Yield the items of an asynchronous iterator."""
        try:
            while (found := self.call(_next(items))) is not None:
                yield found[0]
        finally:
            self.call(items.aclose())


async def _next(items: AsyncGenerator[T, None]) -> tuple[T] | None:
    async for item in items:
        return (item,)
    return None


def _end(
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
    closing: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    async def end() -> None:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(closing(), _CLOSING_SECONDS)
        loop.stop()

    asyncio.run_coroutine_threadsafe(end(), loop)
    # Garbage may be collected in the loop's own thread, which cannot wait for itself.
    if thread is not threading.current_thread():
        thread.join(_CLOSING_SECONDS)
        if not thread.is_alive():
            loop.close()
