"""Ctrl-C: the first one asks for an orderly end, the second one ends at once."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator

from stepfleet.orchestrator.cli.exits import INTERRUPTED


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
