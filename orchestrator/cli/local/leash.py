"""Runs a module as `python -m` does, and ends it when the process that started it is gone.

The starter keeps the other end of our standard input: it closes however the starter ends,
by SIGKILL too, so that no worker outlives its `stepfleet run`. A private Redis is gone by then, so
that there is not much to wait for; at another one, a worker hands back what it does.
"""

import os
import runpy
import signal
import sys
import threading

from stepfleet.orchestrator.cli.setup.open_files import raise_open_files_limit

_DRAIN_SECONDS = 5.0
_ENDING_SECONDS = 3.0


def watch_starter() -> None:
    """End this process when standard input closes: at first by SIGTERM, later by SIGKILL."""
    threading.Thread(target=_end_with_starter, name="leash", daemon=True).start()


def _end_with_starter() -> None:
    while os.read(0, 1024):
        continue
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(_DRAIN_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)  # a worker hands back now what it has not finished
    threading.Event().wait(_ENDING_SECONDS)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Run the module that the first argument names, with the others as its own."""
    watch_starter()
    raise_open_files_limit()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
