"""One event loop in a thread of its own, for plain code that calls asynchronous code.

A process that is forked has neither the thread nor connections of its own: there the loop begins
anew at the next call, and what was inherited is left to the parent (`forked_sockets`).
"""

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from functools import cache
from typing import Any, TypeVar

from stepfleet.orchestrator.errors import StoreError

_LEFT: list[object] = []


def abandon_sockets(loop: asyncio.AbstractEventLoop, *kept: object) -> None:
    """Abandon `loop` and the sockets that it watches; keep `kept` from the garbage collector.

    For the child of a fork, where the loop's thread does not run.
    """
    _LEFT.extend((loop, kept))
    null = os.open(os.devnull, os.O_RDWR)
    try:
        for descriptor in _descriptors(loop):
            with contextlib.suppress(OSError):
                os.dup2(null, descriptor, inheritable=False)
    finally:
        os.close(null)


def _descriptors(loop: Any) -> list[int]:
    """Return the descriptors of an asyncio loop: watched ones, the selector, the waker."""
    found: list[int] = []
    selector = getattr(loop, "_selector", None)
    if selector is not None:
        found += [key.fd for key in (selector.get_map() or {}).values()]
        if hasattr(selector, "fileno"):
            found.append(selector.fileno())
    if (waker := getattr(loop, "_csock", None)) is not None:
        found.append(waker.fileno())
    return [one for one in found if one > 2]  # noqa: PLR2004 - never the standard streams


T = TypeVar("T")
_CLOSING_SECONDS = 30.0
_FORKED = (
    "this process was forked while results were being read; their reader belongs to the parent"
    " process: read them again"
)
_PORTALS: "weakref.WeakSet[Portal]" = weakref.WeakSet()


class Portal:
    """One event loop in a daemon thread, for calls from anywhere else; begun by the first call.

    Ends, after `closing`, when it is closed, collected, or the interpreter ends. In a forked child
    `forget` drops what `closing` would close, and returns it: it has to stay uncollected.
    """

    def __init__(
        self,
        closing: Callable[[], Coroutine[Any, Any, None]],
        forget: Callable[[], object] = lambda: None,
    ) -> None:
        self.forks = 0
        """The forks of the process since: objects from before a fork are useless after it."""
        self._closing = closing
        self._forget = forget
        self._beginning = threading.Lock()
        self._running: asyncio.AbstractEventLoop | None = None
        self._end: weakref.finalize[Any, Any] | None = None
        _follow_forks()
        _PORTALS.add(self)

    def close(self) -> None:
        """End the loop, after `closing`; a further call begins another one."""
        with self._beginning:
            end, self._end, self._running = self._end, None, None
        if end is not None:
            end()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns; an interrupt of the caller cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def each(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """Yield the items of an asynchronous iterator. Raises `StoreError` after a fork."""
        forks = self.forks
        try:
            while (found := self.call(anext_of(items))) is not None:
                yield found[0]
                if forks != self.forks:
                    raise StoreError(_FORKED)
        finally:
            if forks == self.forks:
                self.call(items.aclose())

    def forked(self) -> None:
        """Begin anew in a process that was forked; the parent's connections are not touched."""
        self.forks += 1
        self._beginning = threading.Lock()  # another thread of the parent may hold the old one
        left, self._running = self._running, None
        if self._end is not None:
            self._end.detach()
            self._end = None
        if left is not None:
            abandon_sockets(left, self._forget())

    def _loop(self) -> asyncio.AbstractEventLoop:
        with self._beginning:
            if self._running is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(
                    target=loop.run_forever, name="stepfleet-client", daemon=True
                )
                thread.start()
                self._running = loop
                self._end = weakref.finalize(self, _end, loop, thread, self._closing)
            return self._running


@cache
def _follow_forks() -> None:
    os.register_at_fork(after_in_child=_begin_anew)


def _begin_anew() -> None:
    for portal in list(_PORTALS):
        portal.forked()


async def anext_of(items: AsyncGenerator[T, None]) -> tuple[T] | None:
    """Return the next item in a tuple; None at the end."""
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
