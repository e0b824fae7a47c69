"""Ctrl-C or a closed terminal: the first requests an orderly end, the second ends at once."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from stepfleet.orchestrator.cli.terminal.exit_codes import INTERRUPTED

T = TypeVar("T")


class Interrupts:
    """Whether the user wants to stop; the first SIGINT, SIGTERM or SIGHUP sets `requested`."""

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
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            numbers.append(signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield self
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if not self.requested.is_set():
            self.requested.set()
            return
        for action in self._before_exit:
            action()
        os._exit(INTERRUPTED)


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
