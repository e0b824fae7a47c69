"""The operating system's limits of a process; what it is started from hands them on."""

import contextlib
import resource

ENOUGH = 65_536


def raise_open_files_limit() -> None:
    """Let this process, and what it starts, hold as many files as it may, up to `ENOUGH`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS has a lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_files_limit() -> int:
    """Return how many files a worker can hold; -1 for no limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return -1 if hard == resource.RLIM_INFINITY else hard
