"""Notices that whoever started the server is gone, and raises the limit of open files."""

import asyncio
import os
import resource
import sys
import threading
import time
from collections.abc import Callable

_POLL_SECONDS = 0.25


def raise_open_files_limit() -> None:
    """Allow as many open files, hence connections, as the system lets this process have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def when_gone(pid: int, loop: asyncio.AbstractEventLoop, then: Callable[[], None]) -> None:
    """Run `then` on the loop when the process `pid` is gone."""

    def watch() -> None:
        started_by = os.getppid()
        # A child sees its parent's end as a new parent: that also holds where the pid is reused
        # or the parent stays behind as a zombie.
        while _lives(pid) and (started_by != pid or os.getppid() == pid):
            time.sleep(_POLL_SECONDS)
        loop.call_soon_threadsafe(then)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def when_input_ends(loop: asyncio.AbstractEventLoop, then: Callable[[], None]) -> None:
    """Run `then` on the loop when standard input ends."""

    def watch() -> None:
        # Straight from the descriptor: a reader blocked in sys.stdin keeps its lock, and the
        # interpreter needs that lock to end.
        while os.read(sys.stdin.fileno(), 4096):
            pass
        loop.call_soon_threadsafe(then)

    threading.Thread(target=watch, name="watch-input", daemon=True).start()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
