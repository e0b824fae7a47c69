"""Starts, joins and leaves the private server of a folder; must not know its data.

All users of a folder share one server. Users hold a shared file lock, and the guardian beside the
server ends it when nobody holds that lock any more: after the last ``stop()``, or when the last
user dies, by SIGKILL too.
"""

import secrets
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from stepfleet.orchestrator.store.embedded import guardian
from stepfleet.orchestrator.store.embedded.admin_commands import (
    Answer,
    ask,
    is_ready,
    rewrite_as_it_grows,
    shut_down,
)
from stepfleet.orchestrator.store.embedded.binary import Program, find_server_binary
from stepfleet.orchestrator.store.embedded.folder import Address, EmbeddedRedisError, Folder
from stepfleet.orchestrator.store.embedded.locks import (
    FileLock,
    has_process,
    held_alone,
    is_held,
    poll,
)

# Above the ports of common services, below the ephemeral ones: a client that tries a dead
# ephemeral port again and again can end up connected to itself.
_LOWEST, _COUNT = 20_000, 12_768
_TRIES = 1_000


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


_PORT_TRIES = 20
_ENDING_SECONDS = 70.0
_REWRITE_SECONDS = 10.0
"""How long a stop waits for a rewrite of the file, which goes on without it."""

Say = Callable[[str], None]
"""Takes a line for the user about a long wait."""


def _unsaid(line: str) -> None:
    """Say nothing."""


class EmbeddedRedis:
    """A user's hold on a folder's private server; ``url`` is its address with password."""

    def __init__(
        self, folder: Folder, address: Address, users: FileLock, *, brief: bool, say: Say
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
    return address is not None and ask(address) is Answer.LOADING


class _Start:
    """One start of a folder's server; its caller holds the start lock."""

    def __init__(self, place: Folder, port: int | None, startup_seconds: float, say: Say) -> None:
        self._place = place
        self._port = port
        self._startup_seconds = startup_seconds
        self._say = say

    def join_or_launch(self, users: FileLock) -> Address:
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

    def _launch(self, last: Address | None) -> Address:
        program = find_server_binary(last.server if last and self._place.has_data else "")
        password = last.password if last else secrets.token_urlsafe(32)
        port = choose_port(self._port, last.port if last else None)
        for _ in range(_PORT_TRIES):
            address = Address(port, password, program.name)
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

    def _check_port(self, running: Address) -> None:
        if self._port not in (None, running.port):
            raise EmbeddedRedisError(
                f"The server in {self._place.root} already listens on port {running.port}, not on "
                f"{self._port}. Fix: leave out the port, or name another data folder."
            )

    def _guarded(self) -> bool:
        return is_held(self._place.guardian_lock)

    def _is_ready(self, address: Address) -> bool:
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
