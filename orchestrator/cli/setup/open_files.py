"""The limit of open files of a process, which its child processes inherit."""

import contextlib
import resource

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
