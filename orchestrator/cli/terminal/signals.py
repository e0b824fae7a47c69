"""Ctrl-C: the first one asks for an orderly end, the second one ends at once."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from stepfleet.orchestrator.cli.terminal.exit_codes import INTERRUPTED

T = TypeVar("T")


class Interrupts:
    """Whether somebody asked to stop; `asked` is set by the first SIGINT or SIGTERM."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self._at_once: list[Callable[[], None]] = []

    def before_leaving_at_once(self, action: Callable[[], None]) -> None:
        """Have `action` done when a second signal ends everything."""
        self._at_once.append(action)

    @contextlib.contextmanager
    def heard(self) -> Iterator["Interrupts"]:
        """Take the signals over for as long as the block runs, in the running loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._hear)
        try:
            yield self
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _hear(self) -> None:
        if not self.asked.is_set():
            self.asked.set()
            return
        for action in self._at_once:
            action()
        os._exit(INTERRUPTED)


async def until_asked(
    work: Coroutine[Any, Any, T],
    asked: asyncio.Event,
    beside: Coroutine[Any, Any, None] | None = None,
) -> T | None:
    """Return what `work` returns, or None when somebody asked to stop before that.

    `beside` runs meanwhile and does not end by itself; what it raises ends the work.
    """
    working = asyncio.create_task(work)
    tasks: list[asyncio.Task[Any]] = [working, asyncio.create_task(asked.wait())]
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
