"""Writes results files: line by line as runs end, no partial lines, no duplicates.

A new file can be read by its owner only, since results and prompts are private. An existing file
keeps its mode, also where it is replaced.
"""

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import orjson

from stepfleet.orchestrator.batches.openai_format import to_openai_line
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.batch import BatchFormat
from stepfleet.orchestrator.records.run.results import AgentRunResult


class ResultFile:
    """A results file that grows; lines that it already has are kept and not written again.

    Opening raises `ConfigurationError` where the file cannot be written or holds other data;
    `add` raises it when a line cannot be written (a full disk).
    """

    def __init__(self, path: Path, kind: BatchFormat) -> None:
        self.path = path
        self._kind = kind
        self._descriptor = _open(path)
        self._regular = stat.S_ISREG(os.fstat(self._descriptor).st_mode)
        try:
            # A pipe or a device has no earlier lines.
            self._keys = self._known_keys() if self._regular else set()
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
            # O_APPEND and one write: a line is complete or, after a crash, cut at the end.
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

    def __exit__(self, *_: object) -> None:
        self.close()

    def _known_keys(self) -> set[str]:
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
                        "name another file, so that the two are not mixed"
                    )
                    raise ConfigurationError(msg)
                keys.add(key)
                whole += len(line)
        os.ftruncate(self._descriptor, whole)
        return keys


def check_writable(path: Path) -> None:
    """Raise `ConfigurationError` where `path` cannot become a results file; changes nothing."""
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
    """Return whether the file is missing or empty; pipes and devices keep nothing."""
    return _is_special(path) or not path.exists() or path.stat().st_size == 0


@contextlib.contextmanager
def replacing(path: Path, kind: BatchFormat) -> Iterator[ResultFile]:
    """Give a file written beside its place, and move it there whole when it is complete.

    A pipe or device gets the lines at once.
    """
    if _is_special(path):
        with ResultFile(path, kind) as file:
            yield file
        return
    check_writable(path)
    place = path.resolve()
    fresh = place.with_name(f".{place.name}.{os.getpid()}.new")
    fresh.unlink(missing_ok=True)
    # Created exclusively: a link that somebody else has put there is not followed.
    try:
        os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        raise _not_writable(fresh, error) from None
    try:
        with ResultFile(fresh, kind) as file:
            yield file
        if place.exists():
            fresh.chmod(stat.S_IMODE(place.stat().st_mode))
        fresh.replace(place)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


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
        # Waiting for a reader could not be interrupted.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        msg = f"--out {path}: this pipe has no reader; start its reader first"
        raise ConfigurationError(msg) from None
    os.set_blocking(descriptor, True)
    return descriptor


def _is_special(path: Path) -> bool:
    """Return whether `path` exists and is neither a file nor a folder."""
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


def to_line(result: AgentRunResult, kind: BatchFormat) -> bytes:
    """Return the line of a run, with its line break; our own format begins with the line's id."""
    own = {"id": result.line_id or result.run_id}
    data = to_openai_line(result) if kind == "openai" else {**own, **result.to_dict()}
    return orjson.dumps(data, default=str) + b"\n"


def print_line(result: AgentRunResult, kind: BatchFormat) -> None:
    """Print the line of a run on standard output, at once."""
    sys.stdout.write(to_line(result, kind).decode())
    sys.stdout.flush()


def key_of(result: AgentRunResult, kind: BatchFormat) -> str:
    """Return the key that identifies the run's line in its batch."""
    if kind == "openai":
        return str(to_openai_line(result).get("custom_id"))
    return result.run_id


def key_in(line: bytes, kind: BatchFormat) -> str | None:
    """Return the key of a line that was written before; None where it is no such line."""
    try:
        data = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    name = "custom_id" if kind == "openai" else "run_id"
    key = data.get(name) if isinstance(data, dict) else None
    return key if isinstance(key, str) else None
