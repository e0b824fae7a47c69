"""Runs a module as `python -m` does, and ends it when the process that started it is gone.

The parent holds the other end of our standard input, which closes however the parent ends, by
SIGKILL too: no worker outlives its `stepfleet run`. With a private Redis, which ends as well, there
is little to wait for; with another one, a worker releases its steps first.
"""

import contextlib
import os
import resource
import runpy
import signal
import sys
import threading

ENOUGH = 65_536


def raise_open_files_limit() -> None:
    """Raise the limit of this process and its children as far as allowed, up to `ENOUGH`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS has a lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_files_limit() -> int:
    """Return how many files a worker can open; -1 for no limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return -1 if hard == resource.RLIM_INFINITY else hard


_DRAIN_SECONDS = 5.0
_ENDING_SECONDS = 3.0


def _end_with_parent() -> None:
    """Wait until standard input closes, then end this process: by SIGTERM, later by SIGKILL."""
    while os.read(0, 1024):
        continue
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(_DRAIN_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)  # a worker releases its unfinished steps
    threading.Event().wait(_ENDING_SECONDS)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Run the module that the first argument names, with the others as its own."""
    threading.Thread(target=_end_with_parent, name="parent-watchdog", daemon=True).start()
    raise_open_files_limit()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
