"""Runs one asyncio event loop in a thread of its own and measures how late it is.

Decides which loop implementation is used and how the loop ends. Must not know what runs on it.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

new_event_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
with contextlib.suppress(ImportError):  # no wheel for this platform: the same, slower
    import uvloop

    new_event_loop = uvloop.new_event_loop

logger = logging.getLogger(__name__)

_LAG_PROBE_SECONDS = 0.5
_JOIN_SECONDS = 2.0


class LoopThread:
    """An event loop and the daemon thread that runs it; made stopped."""

    def __init__(self, name: str) -> None:
        self.loop: asyncio.AbstractEventLoop = new_event_loop()
        self.lag = 0.0
        self.worst_lag = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def implementation(self) -> str:
        """Name of the loop's package: ``uvloop`` or ``asyncio``."""
        return type(self.loop).__module__.partition(".")[0]

    @property
    def usable(self) -> bool:
        """Whether the thread runs; false in a process forked from the one that started it."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Run the loop; work submitted before waits for this."""
        self._thread.start()

    def submit(self, callback: Callable[..., object], *args: object) -> None:
        """Run the callback on the loop, from any thread; dropped once the loop has ended."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(callback, *args)

    def stop(self, last: Coroutine[Any, Any, object], within: float) -> None:
        """Run the coroutine ``last`` for at most ``within`` s, then end loop and thread."""
        if not self._thread.is_alive():
            last.close()
            return
        final = asyncio.run_coroutine_threadsafe(last, self.loop)
        try:
            final.result(timeout=within)
        except concurrent.futures.TimeoutError:
            logger.warning("The event loop %s was busy for %s s; leaving it", self._name, within)
        except Exception:
            logger.exception("The last coroutine of the event loop %s failed", self._name)
        self.submit(self.loop.stop)
        self._thread.join(timeout=_JOIN_SECONDS)

    def discard(self) -> None:
        """Free the loop of a thread that never started."""
        self.loop.close()

    @property
    def _name(self) -> str:
        return self._thread.name

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self._probe_lag(time.monotonic())
        try:
            while not self._ran_to_its_end():
                pass
        finally:
            self.loop.close()

    def _ran_to_its_end(self) -> bool:
        """Run the loop until it is stopped; return false where foreign code has ended it.

        asyncio lets SystemExit and KeyboardInterrupt of any task end the loop, and whatever else
        runs in it would never go on, in a process that looks alive. Signals reach the main thread
        only. Whoever awaits that task hears of it as of any exception.
        """
        try:
            self.loop.run_forever()
        except (SystemExit, KeyboardInterrupt):
            logger.exception("A task of the event loop %s tried to end it; it goes on", self._name)
            return False
        return True

    def _probe_lag(self, expected: float) -> None:
        now = time.monotonic()
        self.lag = max(0.0, now - expected)
        self.worst_lag = max(self.worst_lag, self.lag)
        self.loop.call_later(_LAG_PROBE_SECONDS, self._probe_lag, now + _LAG_PROBE_SECONDS)
