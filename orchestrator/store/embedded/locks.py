"""File locks that the operating system drops when their holder ends, however it ends."""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_PAUSE_SECONDS = 0.02


class FileLock:
    """A lock on one file; each instance is a holder of its own, also within one process."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def try_shared(self) -> bool:
        """Hold it together with others; False where someone holds it alone."""
        return self._try(fcntl.LOCK_SH)

    def try_exclusive(self) -> bool:
        """Hold it alone; False where someone else holds it."""
        return self._try(fcntl.LOCK_EX)

    def release(self) -> None:
        """Stop holding it."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Stop holding it for good; harmless when repeated."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _try(self, kind: int) -> bool:
        try:
            fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def is_held(path: Path) -> bool:
    """Tell whether anyone holds the lock."""
    lock = FileLock(path)
    try:
        return not lock.try_exclusive()
    finally:
        lock.close()


def has_process(path: Path) -> bool:
    """Tell whether another process lives that has the file as its lock.

    A lock of `fcntl` is of one process: unlike one of `flock`, which earlier versions used, the
    processes that it forks have no part in it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return is_held(path)


@contextmanager
def held_alone(
    path: Path, *, within: float, progresses: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Hold the lock alone during the block.

    Raises TimeoutError after `within` seconds, counted anew as long as its holder `progresses`.
    """
    lock = FileLock(path)
    try:
        while not poll(lock.try_exclusive, within=within):
            if not progresses():
                raise TimeoutError(str(path))
        yield
    finally:
        lock.close()


def poll(check: Callable[[], bool], *, within: float) -> bool:
    """Ask until the answer is true or ``within`` seconds are over; return the last answer."""
    deadline = time.monotonic() + within
    while not check():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_PAUSE_SECONDS)
    return True
