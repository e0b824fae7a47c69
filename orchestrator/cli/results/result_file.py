"""Writes results files: line by line as runs end, never a half line, none twice.

A file that is made is its owner's alone, since results and prompts are nobody else's business; one
that was there keeps the mode that its owner gave it, also where it is replaced.

Knows how to write; what a line says is in `result_lines`.
"""

import errno
import os
import stat
import sys
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from stepfleet.orchestrator.cli.results.result_lines import key_in, key_of, to_line
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.batch import BatchFormat
from stepfleet.orchestrator.records.run.results import AgentRunResult


class Sink(Protocol):
    """Where results go."""

    def add(self, result: AgentRunResult) -> None:
        """Take one result; one that is there already changes nothing."""
        ...


class Nowhere:
    """Results that nobody asked for as lines."""

    def add(self, result: AgentRunResult) -> None:
        """Drop it."""


class StandardOutput:
    """Results as lines on standard output."""

    def __init__(self, kind: BatchFormat) -> None:
        self._kind = kind

    def add(self, result: AgentRunResult) -> None:
        """Print the line at once."""
        sys.stdout.write(to_line(result, self._kind).decode())
        sys.stdout.flush()


class ResultFile:
    """A results file that grows; what is in it already is kept and not written again.

    Raises `ConfigurationError` on opening where the file cannot be written or holds something
    else, and later when a line cannot be written (a full disk).
    """

    def __init__(self, path: Path, kind: BatchFormat) -> None:
        self.path = path
        self._kind = kind
        self._descriptor = _open(path)
        self._regular = stat.S_ISREG(os.fstat(self._descriptor).st_mode)
        try:
            # A pipe or a device has nothing to go on from.
            self._keys = self._what_is_there() if self._regular else set()
        except BaseException:
            os.close(self._descriptor)
            raise

    @property
    def count(self) -> int:
        """How many runs' lines are in the file."""
        return len(self._keys)

    def add(self, result: AgentRunResult) -> None:
        """Append the run's line unless it is there."""
        key = key_of(result, self._kind)
        if key in self._keys:
            return
        line = to_line(result, self._kind)
        try:
            # O_APPEND and one write: a line is there whole or, after a crash, cut at the end.
            written = os.write(self._descriptor, line)
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
        except OSError as error:
            raise _not_writable(self.path, error) from None
        self._keys.add(key)

    def close(self) -> None:
        """Make the lines durable and close the file."""
        if self._regular:
            os.fsync(self._descriptor)
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _what_is_there(self) -> set[str]:
        """Return the keys of the file's lines; cut off a last line without its end."""
        keys = set()
        whole = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                key = key_in(line, self._kind)
                if key is None:
                    msg = (
                        f"--out {self.path}: line {number} is no result of format {self._kind}; "
                        "name another file, so that this one is not mixed up"
                    )
                    raise ConfigurationError(msg)
                keys.add(key)
                whole += len(line)
        os.ftruncate(self._descriptor, whole)
        return keys


def check_writable(path: Path) -> None:
    """Raise `ConfigurationError` where `path` cannot become a results file; leaves it as it is."""
    if _is_special(path):
        # Opening a pipe and closing it again would be its reader's end of file.
        if not os.access(path, os.W_OK):
            raise _not_writable(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
        return
    existed = path.exists()
    os.close(_open(path))
    if not existed:
        path.unlink()


def is_empty(path: Path) -> bool:
    """Return whether there is no such file, or nothing in it; nothing stays in a pipe or device."""
    return _is_special(path) or not path.exists() or path.stat().st_size == 0


def replacing(path: Path, kind: BatchFormat) -> "Replacement | ResultFile":
    """Return what writes a file anew: beside its place, or straight into a pipe or device."""
    return ResultFile(path, kind) if _is_special(path) else Replacement(path, kind)


class Replacement:
    """A results file written beside its place and moved there whole when it is complete."""

    def __init__(self, path: Path, kind: BatchFormat) -> None:
        check_writable(path)
        self._path = path.resolve()
        self._fresh = self._path.with_name(f".{self._path.name}.{os.getpid()}.new")
        self._fresh.unlink(missing_ok=True)
        # Made here and now: a link that somebody else has put there is not followed.
        try:
            os.close(os.open(self._fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except OSError as error:
            raise _not_writable(self._fresh, error) from None
        self._file = ResultFile(self._fresh, kind)

    def add(self, result: AgentRunResult) -> None:
        """Add the run's line."""
        self._file.add(result)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if kind is None:
            if self._path.exists():
                self._fresh.chmod(stat.S_IMODE(self._path.stat().st_mode))
            self._fresh.replace(self._path)
        else:
            self._fresh.unlink(missing_ok=True)


def _open(path: Path) -> int:
    try:
        if _is_special(path):
            # To write only: a device such as /dev/full can be read without end.
            return _open_special(path)
        return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError as error:
        raise _not_writable(path, error) from None


def _open_special(path: Path) -> int:
    try:
        # Without waiting for a reader, which nobody could interrupt.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        msg = f"--out {path}: nobody reads this pipe; start its reader first"
        raise ConfigurationError(msg) from None
    os.set_blocking(descriptor, True)
    return descriptor


def _is_special(path: Path) -> bool:
    """Tell whether there is something at `path` that is neither a file nor a folder."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _not_writable(path: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"--out {path} cannot be written: {error.strerror}; name a file in a folder that exists "
        "and that you may write to"
    )
