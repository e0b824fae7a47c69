"""The files of one folder, or of one prefix of object storage, through fsspec.

fsspec's calls block, and a storage may hang: each runs in a thread of its own, for at most
`CALL_SECONDS`. The threads are daemons, which `asyncio.to_thread`'s are not: those would keep a
process with a hung storage from ending.
"""

import asyncio
import contextlib
import errno
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import parse_qsl

from stepfleet.orchestrator.errors import ArchiveError, ConfigurationError
from stepfleet.orchestrator.records.text.redaction import redact

CALL_SECONDS = 60.0
"""For how long a call may wait for the storage."""
LATE_CALLS = 8
"""Calls that were given up and have not returned: with that many, a place makes no further ones."""
STALE_SECONDS = 3600.0
"""How old a temporary file is when nobody can be writing it any more."""
_EXAMPLES = "file:///var/lib/stepfleet/archive, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"
_LOCAL = ("file", "local")
_OBJECTS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
"""Protocols of object stores: an object is there as a whole or not at all, and has no folder."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_TALKATIVE = ("aiobotocore", "botocore", "s3fs", "gcsfs", "fsspec")
_SWITCHES = {"true": True, "false": False}

T = TypeVar("T")


class ArchivePlace:
    """Files of one folder, or of one prefix of object storage, by fsspec.

    Safe in forks and in several event loops. A call that was given up as late may still take
    effect: a file must have the same content whenever it is written under the same name.
    """

    def __init__(self, url: str, folder: str, kind: Any, options: Mapping[str, Any]) -> None:
        self.url = shown_url(url)
        """As people may see it: without credentials and options."""
        self._given = url
        self._protocol = url.partition("://")[0]
        self._folder = folder
        self._kind = kind
        self._options = options
        self._files: tuple[int, Any] | None = None
        self._swept = -STALE_SECONDS
        self._late: set[Future[Any]] = set()

    @classmethod
    def open(cls, url: str) -> Self:
        """Return the place at `url`; the network is not used yet.

        Fields behind a `?` are options of the storage's class in fsspec (`endpoint_url=...`).
        Raises `ConfigurationError` if the URL is wrong, or a package for it is missing.
        """
        protocol, separator, rest = url.partition("://")
        # A path may have a question mark.
        base, _, query = (rest, "", "") if protocol in _LOCAL else rest.partition("?")
        if not separator or not protocol:
            raise ConfigurationError(f"archive_url names no protocol: write {_EXAMPLES}")
        if protocol in _LOCAL and not base.startswith("/"):
            raise ConfigurationError(
                "archive_url is a relative path: write an absolute one, with three slashes: "
                "file:///var/lib/stepfleet/archive"
            )
        if not base.strip("/"):
            raise ConfigurationError(f"archive_url names no path: write {_EXAMPLES}")
        kind, address = _storage(protocol), f"{protocol}://{base}"
        for name in _TALKATIVE:  # their debug lines have whole requests, with what is archived
            logging.getLogger(name).setLevel(logging.INFO)
        folder = str(kind._strip_protocol(address)).rstrip("/")  # noqa: SLF001 - fsspec's hook
        if "@" in folder.lstrip("/").partition("/")[0] and protocol not in _LOCAL:
            raise ConfigurationError(
                "archive_url has credentials where its storage takes none: set the storage's own "
                "variables (such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)"
            )
        options = kind._get_kwargs_from_urls(address)  # noqa: SLF001 - the same
        options |= {key: _SWITCHES.get(one, one) for key, one in parse_qsl(query)}
        return cls(address, folder, kind, options)

    async def write(self, name: str, data: bytes) -> None:
        """Write a file, or replace it; it is durable when this returns.

        Raises `ArchiveError`: then the file under that name, if any, is as it was before.
        """
        path = self._path(name)

        def work(files: Any) -> None:
            if self._protocol in _OBJECTS:
                files.pipe_file(path, data)
                return
            if time.monotonic() - self._swept >= STALE_SECONDS:
                self._list(files)
            temporary = f"{self._folder}/.{uuid.uuid4().hex}.part"
            if self._protocol in _LOCAL:
                _write_durably(Path(temporary), Path(path), data)
            else:
                _write_renamed(files, temporary, path, data)

        await self._call("write", name, work)

    async def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Return a file's bytes from `start` on, `length` of them or all; only those are read.

        Raises `ArchiveError`, with `is_missing` where there is no such file, or it has fewer bytes.
        """
        path = self._path(name)
        if start < 0 or (length is not None and length < 0):
            raise ValueError(f"{length} bytes from {start} are no part of a file")
        if length == 0:
            return b""  # HTTP has no range for it
        whole = start == 0 and length is None
        end = None if length is None else start + length

        def work(files: Any) -> bytes:
            if self._protocol in _LOCAL and not Path(self._folder).is_dir():
                raise OSError("the folder is not there: is its disk mounted?")
            found = bytes(files.cat_file(path, start=None if whole else start, end=end))
            if length is not None and len(found) != length:
                raise EOFError(f"{len(found)} bytes where {length} were expected, from {start}")
            return found

        return await self._call("read", name, work)

    async def remove(self, name: str) -> None:
        """Remove a file. A missing one is no error; raises `ArchiveError`."""
        path = self._path(name)

        def work(files: Any) -> None:
            try:
                files.rm_file(path)
            except FileNotFoundError as error:
                if _has_no_bucket(error):
                    raise

        await self._call("remove", name, work)

    async def names(self) -> list[str]:
        """Return the names of the files directly in the folder, sorted; raises `ArchiveError`.

        A folder that is not there yet has none. Hidden files do not count.
        """
        return await self._call("list", "the files", self._list)

    def _list(self, files: Any) -> list[str]:
        """Return the names, after removing temporary files that nobody writes any more."""
        self._swept = time.monotonic()
        try:
            entries = files.ls(self._folder, detail=True)
        except FileNotFoundError as error:
            if _has_no_bucket(error):
                raise
            return []
        prefix = f"{self._folder}/".lstrip("/")
        found = [
            entry["name"].lstrip("/").removeprefix(prefix)
            for entry in entries
            if entry["type"] == "file" and entry["name"].lstrip("/").startswith(prefix)
        ]
        if self._protocol not in _OBJECTS:
            for name in found:
                if name.startswith(".") and name.endswith(".part"):
                    _remove_stale(files, f"{self._folder}/{name}")
        return sorted(name for name in found if name and "/" not in name and name[0] != ".")

    def _path(self, name: str) -> str:
        if not _NAME.fullmatch(name):
            msg = f"archive {self.url}: {name!r:.80} is no name of a file of an archive"
            raise ArchiveError(msg, is_missing=True)
        return f"{self._folder}/{name}"

    def _opened(self) -> Any:
        """Return fsspec's object for this process, which is made here: some log in at once."""
        if self._files is None or self._files[0] != os.getpid():
            files = self._kind(
                **{"skip_instance_cache": True, "use_listings_cache": False, **self._options}
            )
            self._files = (os.getpid(), files)
        return self._files[1]

    async def _call(self, doing: str, name: str, work: Callable[[Any], T]) -> T:
        self._late = {one for one in self._late if not one.done()}
        if len(self._late) >= LATE_CALLS:
            raise self._error(doing, name, f"{len(self._late)} earlier calls have not returned")
        done: Future[T] = Future()
        done.set_running_or_notify_cancel()  # whoever gives up waiting does not cancel it

        def run() -> None:
            try:
                done.set_result(work(self._opened()))
            except Exception as error:  # noqa: BLE001 - of any storage; the caller sees it
                done.set_exception(error)

        threading.Thread(target=run, name="stepfleet-archive", daemon=True).start()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(done), CALL_SECONDS)
        except Exception as error:  # noqa: BLE001 - what a storage raises has no common class
            if not done.done():
                raise self._error(doing, name, f"no answer within {CALL_SECONDS:g} s") from None
            missing = isinstance(error, FileNotFoundError) and not _has_no_bucket(error)
            why = "there is no such file" if missing and doing == "read" else _reason(error)
            # Without the cause: what it says may have credentials.
            missing = doing == "read" and (missing or _is_short(error))
            raise self._error(doing, name, why, is_missing=missing) from None
        finally:
            if not done.done():
                self._late.add(done)

    def _error(self, doing: str, name: str, why: str, *, is_missing: bool = False) -> ArchiveError:
        given = {f"ARCHIVE_{key.upper()}": str(one) for key, one in self._options.items()}
        given["ARCHIVE_URL"] = self._given
        why = redact(why, {**os.environ, **given})
        message = f"archive {self.url}: cannot {doing} {name}: {why}"
        return ArchiveError(message, is_missing=is_missing)


def _storage(protocol: str) -> Any:
    """Return fsspec's class for a protocol; raises `ConfigurationError`."""
    try:
        from fsspec.registry import get_filesystem_class, known_implementations  # noqa: PLC0415
    except ImportError:
        msg = "archive_url needs fsspec: pip install 'stepfleet[archive]'"
        raise ConfigurationError(msg) from None
    try:
        return get_filesystem_class(protocol)
    except ImportError as error:
        package = known_implementations[protocol]["class"].partition(".")[0]
        fix = f"pip install {package}" if package != "fsspec" else str(error)
        msg = f"archive_url: {protocol}:// needs a package that is not installed: {fix}"
        raise ConfigurationError(msg) from None
    except ValueError:
        msg = f"archive_url: fsspec knows no protocol {protocol!r}: write {_EXAMPLES}"
        raise ConfigurationError(msg) from None


def shown_url(url: str) -> str:
    """Return a URL without options, and without what stands before the `@` of its host.

    Azure's `container@account` is no secret.
    """
    protocol, _, rest = url.partition("://")
    rest = rest if protocol in _LOCAL else rest.partition("?")[0]
    host, slash, path = rest.partition("/")
    user, at, server = host.rpartition("@")
    if at and (":" in user or protocol not in _OBJECTS):
        host = server
    return f"{protocol}://{host}{slash}{path}".rstrip("/")


def _reason(error: Exception) -> str:
    kind = type(error).__name__
    return f"{kind}: {error}" if str(error) else kind


def _is_short(error: Exception) -> bool:
    """Return whether a file has fewer bytes than were asked for (in S3: no such range)."""
    return isinstance(error, EOFError) or getattr(error, "errno", None) == errno.EINVAL


def _has_no_bucket(error: BaseException) -> bool:
    """Return whether a storage's "not found" is of the bucket: a wrong setting, no missing file."""
    cause = error.__cause__
    response = getattr(cause, "response", None)
    of_s3 = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
    return of_s3 == "NoSuchBucket" or getattr(cause, "error_code", None) == "ContainerNotFound"


def _remove_stale(files: Any, path: str) -> None:
    with contextlib.suppress(FileNotFoundError, NotImplementedError):  # gone; has no times
        changed: datetime = files.modified(path)
        changed = changed if changed.tzinfo else changed.replace(tzinfo=UTC)
        if (datetime.now(UTC) - changed).total_seconds() >= STALE_SECONDS:
            files.rm_file(path)


def _write_renamed(files: Any, temporary: str, path: str, data: bytes) -> None:
    """Write by way of a temporary file, on a server of files that people see while they grow."""
    files.makedirs(path.rpartition("/")[0], exist_ok=True)
    files.pipe_file(temporary, data)
    files.mv(temporary, path)


def _write_durably(temporary: Path, path: Path, data: bytes) -> None:
    """Write on a local disk: after this no crash of the machine loses the file."""
    _make_folder(path.parent)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)


def _make_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(0o700)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
