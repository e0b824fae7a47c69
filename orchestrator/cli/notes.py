"""Notes and locks of commands: which batch a `run` began, who runs it, who writes results.

A batch has a note by its id, the newest batch of equal commands one by their identity, and that of
a file one by its path. Knows files only; whether a batch is still in Redis is for readers to ask.
Locks are the kernel's, on files that name their holder: they end with the process, also by SIGKILL.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.store.batches.batches import id_of_keyed_batch

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


def identity(
    source: bytes, agent: str | None, agents: Mapping[str, Agent], rules: str | None = None
) -> str:
    """Return the identity of what a `run` command does.

    A digest of the file's content, the agents, and the `rules` of a simulated provider.
    """
    digest = hashlib.sha256(source)
    for part in (agent or "", rules or ""):
        digest.update(b"\0" + part.encode())
    for name in sorted(agents):
        digest.update(b"\0" + agents[name].config.digest.encode())
    return digest.hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Note:
    """A command's batch: its idempotency key, its results file, the command that goes on with it.

    `out` is an absolute path, or empty; `results` are the options of the file's form.
    """

    key: str
    out: str = ""
    command: str = ""
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def batch_id(self) -> str:
        """The batch's id, known before the batch is submitted."""
        return id_of_keyed_batch(self.key)


class RunNotes:
    """The notes of one data folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> Note | None:
        """Return the note of a batch's id, or of the newest batch of an identity, if any."""
        try:
            return Note(**orjson.loads((self._folder / f"{name}.json").read_bytes()))
        except (OSError, orjson.JSONDecodeError, TypeError):
            return None

    def write(self, note: Note, *identities: str) -> None:
        """Note a batch before its submission, so that a partial submission is found again.

        Raises `ConfigurationError` where the folder cannot be written (a full disk).
        """
        try:
            self._write(note, identities)
        except OSError as error:
            msg = f"cannot write {self._folder}: {error.strerror}; fix it, rerun: no work is lost"
            raise ConfigurationError(msg) from None

    def _write(self, note: Note, identities: Iterable[str]) -> None:
        for name in filter(None, (note.batch_id, *identities)):
            path = self._folder / f"{name}.json"
            fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
            with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                file.write(orjson.dumps(asdict(note)))
            fresh.replace(path)

    def working_on(self, name: str, what: str, fix: str) -> contextlib.AbstractContextManager[None]:
        """Be the only command that works on a batch, or on an identity without a batch.

        Raises `ConfigurationError` that names `what`, the other command's process and the `fix`.
        """
        return held(self._lock(name), lambda holder: f"{holder} {what}. {fix}")

    def is_worked_on(self, batch_id: str) -> bool:
        """Return whether a living command works on the batch."""
        return is_held(self._lock(batch_id))

    def _lock(self, name: str) -> Path:
        return self._folder / f"{name}.lock"


def new_key(prefix: str = "run") -> str:
    """Return the idempotency key of a new batch."""
    return f"{prefix}-{uuid.uuid4().hex}"
