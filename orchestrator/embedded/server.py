"""Starts, joins and leaves the private server of a folder; must not know what is stored in it.

All users of a folder share one server. Users hold a shared file lock, and the guardian beside the
server ends it when nobody holds that lock any more: after the last ``stop()``, or when the last
user dies, by SIGKILL too.
"""

import secrets
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from stepfleet.orchestrator.embedded import guardian
from stepfleet.orchestrator.embedded.binary import find_server_binary
from stepfleet.orchestrator.embedded.conversation import is_ready, rewrite_file, shut_down
from stepfleet.orchestrator.embedded.failure import EmbeddedRedisError
from stepfleet.orchestrator.embedded.folder import Address, Folder
from stepfleet.orchestrator.embedded.locks import FileLock, held_alone, is_held, poll
from stepfleet.orchestrator.embedded.ports import choose_port

_PORT_TRIES = 20
_ENDING_SECONDS = 70.0


class EmbeddedRedis:
    """A user's hold on a folder's private server; ``url`` is its address with password."""

    def __init__(self, folder: Folder, address: Address, users: FileLock) -> None:
        self.url = address.url
        self._folder = folder
        self._users = users
        self._stopped = False

    @classmethod
    def start(
        cls, folder: str | Path, *, port: int | None = None, startup_seconds: float = 30.0
    ) -> Self:
        """Start the folder's server, or join the one that already runs; return when it answers.

        The folder is made where it is missing and keeps its data between starts. ``port`` asks
        for a certain loopback port, else a free one below 32768 is taken, the last one first.
        Raises EmbeddedRedisError: no server program, a folder that cannot be written, a port
        that is taken, or no answer within ``startup_seconds`` (loading data is not counted).
        """
        place = Folder.prepare(Path(folder))
        try:
            with held_alone(place.start_lock, within=startup_seconds + _ENDING_SECONDS):
                users = FileLock(place.users_lock)
                try:
                    address = _Start(place, port, startup_seconds).join_or_launch(users)
                except BaseException:
                    users.close()
                    raise
        except TimeoutError as error:
            raise EmbeddedRedisError(
                f"Another process is starting or ending the server in {place.root} and takes too "
                f"long. Fix: see {place.log}, end that process, or name another data folder."
            ) from error
        return cls(place, address, users)

    def stop(self) -> None:
        """Leave the server; the last user waits until it has saved everything and ended."""
        if self._stopped:
            return
        self._stopped = True
        try:
            with held_alone(self._folder.start_lock, within=_ENDING_SECONDS):
                if _is_last(self._users):
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


def _wait_until_ended(place: Folder) -> None:
    """Wait for server and guardian to be gone; raises TimeoutError."""

    def ended() -> bool:
        return not is_held(place.server_lock) and not is_held(place.guardian_lock)

    if not poll(ended, within=_ENDING_SECONDS):
        raise TimeoutError


class _Start:
    """One start of a folder's server; its caller holds the start lock."""

    def __init__(self, place: Folder, port: int | None, startup_seconds: float) -> None:
        self._place = place
        self._port = port
        self._startup_seconds = startup_seconds

    def join_or_launch(self, users: FileLock) -> Address:
        """Count among the users first, so that the guardian does not end what is joined."""
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
        shut_down(last)  # a server whose guardian was killed
        _wait_until_ended(self._place)
        return self._launch(last)

    def _launch(self, last: Address | None) -> Address:
        had_data = self._place.has_data
        binary = find_server_binary(Path(last.binary) if last and had_data else None)
        password = last.password if last else secrets.token_urlsafe(32)
        port = choose_port(self._port, last.port if last else None)
        for _ in range(_PORT_TRIES):
            address = Address(port, password, str(binary))
            self._place.write_start(address)
            self._run_guardian(binary)
            if self._is_ready(address):
                if had_data:
                    rewrite_file(address)
                return address
            if self._port is not None or "Address already in use" not in self._place.log_tail():
                break
            port = choose_port(None, None)  # someone took the port between the look and the start
        raise self._no_answer()

    def _run_guardian(self, binary: Path) -> None:
        subprocess.run(  # noqa: S603 - our own program, and a server program that was looked up
            [sys.executable, "-I", guardian.__file__, str(self._place.root), str(binary)],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _check_port(self, running: Address) -> None:
        if self._port not in (None, running.port):
            raise EmbeddedRedisError(
                f"The server in {self._place.root} already listens on port {running.port}, not on "
                f"{self._port}. Fix: leave out the port, or name another data folder."
            )

    def _guarded(self) -> bool:
        return is_held(self._place.guardian_lock)

    def _is_ready(self, address: Address) -> bool:
        return is_ready(address, self._guarded, within=self._startup_seconds)

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
