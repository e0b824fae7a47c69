"""Exit codes of the commands."""

COMPLETED = 0
SOME_FAILED = 1
USAGE = 2
INTERRUPTED = 130


def code_of(*, completed: int, total: int) -> int:
    """Return the exit code of a batch: 0 when every run completed."""
    return COMPLETED if completed == total else SOME_FAILED
