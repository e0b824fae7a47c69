"""Ctrl-C: the first one requests an orderly end, the second one ends at once.

A closed terminal (SIGHUP) is a first Ctrl-C, however often it is reported; `nohup` prevents it.
"""

import asyncio
import contextlib
import os
import signal
import stat
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from stepfleet.orchestrator.cli.options import INTERRUPTED

T = TypeVar("T")


class Interrupts:
    """Whether the user wants to stop; `requested` is set by the first signal."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self._before_exit: list[Callable[[], None]] = []

    def before_exit(self, action: Callable[[], None]) -> None:
        """Call `action` before a second signal ends the process."""
        self._before_exit.append(action)

    @contextlib.contextmanager
    def handled(self) -> Iterator["Interrupts"]:
        """Handle the signals in the running loop for as long as the block runs."""
        loop = asyncio.get_running_loop()
        handlers = {signal.SIGINT: self._on_signal, signal.SIGTERM: self._on_signal}
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            handlers[signal.SIGHUP] = self._on_closed_terminal
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield self
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)

    def _on_closed_terminal(self) -> None:
        # Nobody reads what is printed from now on, and a write to the terminal would fail.
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            if _is_terminal(descriptor):
                os.dup2(nowhere, descriptor)
        os.close(nowhere)
        self.requested.set()

    def _on_signal(self) -> None:
        if not self.requested.is_set():
            self.requested.set()
            return
        for action in self._before_exit:
            action()
        os._exit(INTERRUPTED)


def _is_terminal(descriptor: int) -> bool:
    """Return whether it is a terminal, also if that is gone: no question to it succeeds then."""
    try:
        return stat.S_ISCHR(os.fstat(descriptor).st_mode)
    except OSError:
        return False


async def until_interrupted(
    work: Coroutine[Any, Any, T],
    interrupts: Interrupts,
    beside: Coroutine[Any, Any, None] | None = None,
) -> T | None:
    """Return what `work` returns, or None after an interrupt before that.

    `beside` runs meanwhile and does not end by itself; an exception of it ends the work.
    """
    working = asyncio.create_task(work)
    tasks: list[asyncio.Task[Any]] = [working, asyncio.create_task(interrupts.requested.wait())]
    if beside is not None:
        tasks.append(asyncio.create_task(beside))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in (working, *tasks[2:]):
            if task.done():
                task.result()
        return working.result() if working.done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
