"""Locks of commands: one writes a results file at a time, and one runs a batch.

Kernel locks on files that name their holder: they end with the process, also by SIGKILL.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from stepfleet.orchestrator.errors import ConfigurationError

_LONGEST_PID = 20


@contextlib.contextmanager
def held(path: Path, refusal: Callable[[str], str]) -> Iterator[None]:
    """Hold the lock for the block; its file is there only meanwhile.

    Raises `ConfigurationError` with `refusal` of the holder (`process 123`) where another
    command holds it.
    """
    descriptor = _locked(path, refusal)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Return whether a living command holds the lock."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextlib.contextmanager
def only_writer(out: Path | None) -> Iterator[None]:
    """Be the only command that writes the results file `out`; nothing for none, pipes, devices.

    Raises `ConfigurationError` that names the other command's process.
    """
    if out is None or (out.exists() and not out.is_file()):
        yield
        return
    place = out.resolve()
    if not place.parent.is_dir():  # said where the file is opened
        yield
        return
    with held(place.with_name(f".{place.name}.lock"), lambda holder: _is_written(out, holder)):
        yield


def _is_written(out: Path, holder: str) -> str:
    return f"--out {out}: {holder} is writing it; wait for its end, or name another file"


def _locked(path: Path, refusal: Callable[[str], str]) -> int:
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            msg = f"the lock {path} cannot be taken: {error.strerror}; make its folder writable"
            raise ConfigurationError(msg) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still_at(path, descriptor):
                with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, b"%d" % os.getpid())
                return descriptor
        except BlockingIOError:
            holder = _holder(descriptor)
            os.close(descriptor)
            raise ConfigurationError(refusal(holder)) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder has removed it meanwhile


def _is_still_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except OSError as error:
        if error.errno == errno.ENOENT:
            return False
        raise


def _holder(descriptor: int) -> str:
    text = b""
    with contextlib.suppress(OSError):
        text = os.pread(descriptor, _LONGEST_PID, 0)
    return f"process {int(text)}" if text.isdigit() else "another command"
