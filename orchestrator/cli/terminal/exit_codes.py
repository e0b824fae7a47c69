"""Exit codes, and how a user's error is said. Knows no command."""

import sys
from typing import NoReturn

import typer

COMPLETED = 0
SOME_FAILED = 1
USAGE = 2
INTERRUPTED = 130


def code_of(*, completed: int, total: int) -> int:
    """Return the exit code of a batch: 0 when every run completed."""
    return COMPLETED if completed == total else SOME_FAILED


def end(code: int) -> None:
    """End the command with `code`; go on where it is 0."""
    if code:
        raise typer.Exit(code)


def refuse(message: str) -> NoReturn:
    """Say a user's error on stderr and end with exit code 2."""
    sys.stderr.write(f"Error: {message}\n")
    sys.stderr.flush()
    raise SystemExit(USAGE)
