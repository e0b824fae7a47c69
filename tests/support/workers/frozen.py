"""Stops processes in their tracks, for certain.

SIGSTOP takes effect when the process next gets a processor. Until then it goes on; and a signal of
a lower number that is sent meanwhile, SIGTERM among them, is heard before it.
"""

import contextlib
import signal

import psutil
from support.deadlines import wait_until
from support.workers.ended import lives


def freeze(pid: int) -> None:
    """Send SIGSTOP, and return when every thread of the process has stopped.

    Raises `psutil.NoSuchProcess` where the process has ended instead.
    """
    process = psutil.Process(pid)
    process.send_signal(signal.SIGSTOP)

    def stopped() -> bool:
        if not lives(process):
            raise psutil.NoSuchProcess(pid)
        with contextlib.suppress(psutil.NoSuchProcess):  # a thread ends while it is looked at
            threads = [psutil.Process(thread.id) for thread in process.threads()]
            return all(thread.status() == psutil.STATUS_STOPPED for thread in threads)
        return False

    wait_until(stopped, what=f"the stop of process {pid}")
