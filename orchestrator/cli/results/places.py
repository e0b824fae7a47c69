"""Where results go: files that are replaced as a whole, pipes and devices.

A new file can be read by its owner only, since results and prompts are private. An existing file
keeps its mode, also where it is replaced.
"""

import contextlib
import errno
import glob
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from stepfleet.orchestrator.errors import ConfigurationError


class FullDiskError(ConfigurationError):
    """A results file has no space left on its disk: it can be written as soon as there is some."""


def check_writable(path: Path) -> None:
    """Raise `ConfigurationError` where `path` cannot become a results file; changes nothing."""
    if is_special(path):
        # Opening a pipe and closing it again would be its reader's end of file.
        if not os.access(path, os.W_OK):
            raise not_writable(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
        return
    existed = path.exists()
    os.close(open_to_append(path))
    if not existed:
        path.unlink()


def check_apart(out: Path, source: Path) -> None:
    """Raise `ConfigurationError` where results would be written into their own input file."""
    if out.exists() and source.exists() and out.samefile(source):
        raise ConfigurationError(f"--out {out} is the input file; name another file for results")


def is_empty(path: Path) -> bool:
    """Return whether the file is missing or empty; pipes and devices keep nothing."""
    return is_special(path) or not path.exists() or path.stat().st_size == 0


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Give a file beside `path`, and move it there whole when it is complete and on the disk.

    A pipe or device gets the bytes at once. Raises `ConfigurationError` where it cannot be
    written (a full disk).
    """
    if is_special(path):
        with _translated(path), os.fdopen(open_to_append(path), "wb") as file:
            yield file
        return
    check_writable(path)
    with _translated(path), beside(path.resolve()) as file:
        yield file


@contextlib.contextmanager
def beside(place: Path) -> Iterator[IO[bytes]]:
    """Give a file that takes the place of another one when it is complete and on the disk."""
    _remove_left(place)
    fresh = place.with_name(f".{place.name}.{os.getpid()}.new")
    # Created exclusively: a link that somebody else has put there is not followed.
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            if place.exists():
                fresh.chmod(stat.S_IMODE(place.stat().st_mode))
            os.fsync(file.fileno())
        fresh.replace(place)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def _remove_left(place: Path) -> None:
    """Remove the unfinished replacements of processes that were killed, and our own."""
    for left in place.parent.glob(f".{glob.escape(place.name)}.*.new"):
        process = left.name.removesuffix(".new").rpartition(".")[2]
        if process.isdigit() and (int(process) == os.getpid() or not _is_alive(int(process))):
            left.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def open_to_append(path: Path) -> int:
    """Open a results file to append to it, and return its descriptor.

    Raises `ConfigurationError` with the fix.
    """
    try:
        if is_special(path):
            # To write only: a device such as /dev/full can be read without end.
            return _open_special(path)
        return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError as error:
        raise not_writable(path, error) from None


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


def is_special(path: Path) -> bool:
    """Return whether `path` exists and is neither a file nor a folder."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def not_writable(path: Path, error: OSError) -> ConfigurationError:
    """Return the error of a file that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT) and not is_special(path):
        msg = f"--out {path} cannot be written: {error.strerror}; make room on its disk"
        return FullDiskError(msg)
    return ConfigurationError(
        f"--out {path} cannot be written: {error.strerror}; name a file in a folder that exists "
        "and that you may write to"
    )


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno is None:  # a timeout, of something else
            raise
        raise not_writable(path, error) from None
