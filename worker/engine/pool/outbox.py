"""Carries calls from the event loop's thread to the thread in which Celery's worker lives.

Celery's request bookkeeping, its event buffer and kombu's channels belong to the thread of the
worker's hub. Under prefork results arrive there through a pipe; here they arrive through an outbox
that the hub polls like any other file descriptor, so that acknowledgements made by a call go out
in the hub's next round. Must not know what the calls do.
"""

import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

Call = Callable[[], None]


class HubOutbox:
    """Delivers calls that any thread posts in the hub's thread, which polls ``fileno()``."""

    def __init__(self) -> None:
        self._calls: deque[Call] = deque()
        self._woken = False  # a wake-up is under way that will deliver what is queued
        self._reader, self._writer = socket.socketpair()
        self._reader.settimeout(0)
        self._writer.settimeout(0)

    def fileno(self) -> int:
        """File descriptor that becomes readable with a post; -1 once closed."""
        return self._reader.fileno()

    def post(self, call: Call) -> None:
        """Queue the call and wake the poller, once for any number of calls not yet delivered."""
        self._calls.append(call)
        if not self._woken:
            self._wake()

    def deliver(self) -> None:
        """Make the queued calls; what they post meanwhile waits for the next round."""
        with suppress(OSError):  # nothing to read, or closed
            self._reader.recv(4096)
        self._woken = False
        try:
            for _ in range(len(self._calls)):
                self._calls.popleft()()
        finally:
            if self._calls:
                self._wake()

    def wait(self, seconds: float) -> None:
        """Wait for a post with the signal handlers of the main thread running meanwhile."""
        if not self._calls and self._reader.fileno() >= 0:
            # A signal's handler may end the pool, and close this, while we wait here.
            with suppress(OSError, ValueError):
                select.select([self._reader], [], [], seconds)

    def close(self) -> None:
        """Close both ends."""
        self._reader.close()
        self._writer.close()

    def _wake(self) -> None:
        self._woken = True
        with suppress(OSError):  # full means that a wake-up is pending; closed that nobody polls
            self._writer.send(b"\0")


class DirectOutbox:
    """Makes calls where they are posted: for Celery's blocking loop, which polls no descriptor."""

    def __init__(self) -> None:
        self._posted = threading.Event()

    def post(self, call: Call) -> None:
        """Make the call at once."""
        call()
        self._posted.set()

    def deliver(self) -> None:
        """Nothing is ever left to deliver."""

    def wait(self, seconds: float) -> None:
        """Wait for the next post."""
        self._posted.wait(seconds)
        self._posted.clear()

    def close(self) -> None:
        """Nothing to free."""
