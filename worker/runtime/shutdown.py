"""How a worker process ends: in bounded time, whatever its pool is and whatever its steps do.

The first request to stop drains: steps go on for `drain` seconds, and are handed back then. The
next one hands them back at once. Steps that still run when the bound has passed are left behind:
other workers take them over when their leases have run out.

Decides when these things happen. Knows neither steps nor Redis: each stage calls a function.
"""

import asyncio
import logging
import os
import select
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count

from billiard.process import active_children

from stepfleet.worker.engine.bridge import TERMINATED

log = logging.getLogger(__name__)

HAND_BACK_SECONDS = 8.0
"""How long handing back, and ending after it, may take; the bound is the drain and this."""
NOTICE_SECONDS = 3.0
"""So long a child that is ended waits for the notice that its worker stops."""
EX_FAILURE = 1


class Notice:
    """A one-time signal to the event loops of a process and of all its forked children.

    A pipe with a byte that nobody reads: children that are forked later find it, too, and writing
    it is allowed in a signal handler, whatever locks are held.
    """

    def __init__(self) -> None:
        self._ends: tuple[int, int] | None = None
        self.given = False

    def open(self) -> None:
        """Make the pipe; before the children are forked."""
        if self._ends is None:
            self._ends = os.pipe()

    def give(self) -> None:
        """Give the signal."""
        if not self.given and self._ends is not None:
            self.given = True
            os.write(self._ends[1], b"\0")

    def comes_within(self, seconds: float) -> bool:
        """Wait for it, at most `seconds`, in a thread that has no event loop."""
        return self._ends is not None and bool(select.select([self._ends[0]], [], [], seconds)[0])

    def connect(self, act: Callable[[], None]) -> None:
        """Have `act` called in the running loop when it is given, or soon where it was already."""
        if self._ends is None:
            return
        loop, reader = asyncio.get_running_loop(), self._ends[0]

        def receive() -> None:
            loop.remove_reader(reader)
            act()

        loop.add_reader(reader, receive)


class Stopping:
    """The stages of a worker's end. `drain` in seconds; `leave` ends the process at once."""

    def __init__(self, drain: float, leave: Callable[[float], None] | None = None) -> None:
        self._drain = drain
        self._leave = leave or leave_behind
        self._begun = Notice()
        self._urged = Notice()
        self._signals = count()

    @property
    def has_begun(self) -> bool:
        """Whether the stop was requested."""
        return self._begun.given

    def open(self) -> None:
        """Get ready, before the pool forks children."""
        self._begun.open()
        self._urged.open()

    def connect(self, drain: Callable[[], None], hand_back: Callable[[], None]) -> None:
        """Have these called in the running loop: when the stop begins, and when it must hurry."""
        self._begun.connect(drain)
        self._urged.connect(hand_back)

    def why_ended(self) -> tuple[str, ...]:
        """Return why a signal ends a child of the pool: nothing where the worker stops.

        A stop of the whole process group may reach the worker after its children.
        """
        return () if self._begun.comes_within(NOTICE_SECONDS) else (TERMINATED,)

    def request(self, *, at_once: bool = False) -> None:
        """Handle a signal: the first begins the drain, the next ends it."""
        # Counted in one go: a signal may arrive while the one before it is being handled.
        if next(self._signals) or at_once or self._begun.given:
            self.hurry()
        else:
            self.begin()

    def begin(self) -> None:
        """Begin the drain, unless it has begun."""
        if not self._begun.given:
            self._begun.give()
            self._end_within(self._drain + HAND_BACK_SECONDS)

    def hurry(self) -> None:
        """Hand back what is held, at once."""
        self._begun.give()
        if not self._urged.given:
            self._urged.give()
            self._end_within(HAND_BACK_SECONDS)

    def _end_within(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._leave, (seconds,))
        timer.daemon = True
        timer.start()


def drain_at_hangup() -> None:
    """Let a closed terminal do as SIGTERM, unless `nohup` ignores it.

    Without a terminal SIGHUP stays Celery's: a restart.
    """
    if _has_terminal() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: os.kill(os.getpid(), signal.SIGTERM))


def ignore_hangup() -> None:
    """Let a child of a pool live on when its terminal is closed: its worker drains it."""
    if _has_terminal():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _has_terminal() -> bool:
    with suppress(OSError):
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
        return True
    return False


def leave_behind(seconds: float) -> None:
    """End this process and its pool's children by force."""
    log.error(
        "the worker did not end within %g s of the request to stop: a step or a tool cannot be"
        " interrupted, or Redis is away. It ends now; other workers take its runs over when its"
        " leases have run out",
        seconds,
    )
    for child in active_children():
        with suppress(OSError, TypeError):
            os.kill(child.pid, signal.SIGKILL)
    os._exit(EX_FAILURE)
