"""Decides whether a folder belongs to its user alone; must not know the contents of its files.

A server loads the files, a password in them opens it, and processes of the user write to them. So
nobody else may have put them there, or be able to.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from stepfleet.orchestrator.store.embedded.failure import EmbeddedRedisError

_PARTS = (".", "appendonlydir", "logs", "batches")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS_ENTER = stat.S_IXGRP | stat.S_IXOTH


def check_ownership(root: Path) -> None:
    """Raise EmbeddedRedisError where others own or can write the folder or what lies in it.

    A folder that is missing or unreadable is left to its opener. The folder itself may be a link,
    its entries may not: through a link, a write reaches any file.
    """
    try:
        folder = root.stat()
    except OSError:
        return
    _check_owner(root, folder)
    if folder.st_mode & _OTHERS_WRITE:
        raise _writable(root, root)
    entered = bool(folder.st_mode & _OTHERS_ENTER)
    for path, status in _entries(root):
        if stat.S_ISLNK(status.st_mode):
            raise EmbeddedRedisError(
                f"{path} is a link, and leads what is written to the data folder elsewhere. "
                f"Fix: remove it, or make {root} itself a link."
            )
        _check_owner(path, status)
        # Nobody else reaches a file in a folder that only its owner may enter.
        if entered and status.st_mode & _OTHERS_WRITE:
            raise _writable(path, root)


def _entries(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for part in _PARTS:
        # Not made yet, or gone since: a running server removes files of its own.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for path in (root / part).iterdir():
                with contextlib.suppress(FileNotFoundError):
                    yield path, path.lstat()


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise EmbeddedRedisError(
            f"{path} belongs to user {status.st_uid}, and you are user {os.geteuid()}: what "
            "another user put there is not run. Fix: name a data folder of your own (--data), or, "
            f"if you trust what is in it, take it over: chown -R {os.geteuid()} {path}"
        )


def _writable(path: Path, root: Path) -> EmbeddedRedisError:
    return EmbeddedRedisError(
        f"{path} can be written by other users, who could have put anything there. "
        f"Fix: if you trust what is in it, chmod -R go-w {root}"
    )
