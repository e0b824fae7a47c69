"""The files of a private server and their contents; starts and locks nothing.

Everything is readable by its user only, since the address holds the password.
"""

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stepfleet.orchestrator.errors import ConfigurationError


class EmbeddedRedisError(ConfigurationError):
    """The private Redis server cannot start, be joined or end."""

    code = "EMBEDDED_REDIS_ERROR"


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


_PASSWORD = re.compile(r"[A-Za-z0-9_-]{16,128}")
_LARGEST_PORT = 65_535
_LEFTOVERS = ("temp-*", "appendonlydir/temp-*", "*.new", ".writable-*")
# A file of data may hold any command, and a server runs those that it loads. These
# would load a program, or follow another server; nothing here needs them.
_DISABLED = ("MODULE", "REPLICAOF", "SLAVEOF")


@dataclass(frozen=True)
class ServerAddress:
    """Where a folder's server listens, and the name of the program that writes its data.

    It is read from a file: anything that could lead elsewhere than to a loopback port is refused.
    """

    port: int
    password: str = field(repr=False)
    server: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError for a port, password or name that no start of ours has written."""
        if type(self.port) is not int or not 0 < self.port <= _LARGEST_PORT:
            raise ValueError("port")
        if not _PASSWORD.fullmatch(self.password):
            raise ValueError("password")
        if not isinstance(self.server, str):
            raise TypeError("server")

    @classmethod
    def of(cls, stored: dict[str, Any]) -> "ServerAddress":
        """Return the address in a file; raises ValueError, TypeError or KeyError.

        Earlier versions stored the program's path: its name shows whose data it wrote.
        """
        earlier = Path(stored.get("binary", "")).name.partition("-")[0]
        return cls(stored["port"], stored["password"], stored.get("server", f"{earlier} 0.0.0"))

    @property
    def url(self) -> str:
        """The address with its password, database 0."""
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"


@dataclass(frozen=True)
class Folder:
    """The folder of one private server."""

    root: Path

    @classmethod
    def prepare(cls, root: Path) -> "Folder":
        """Make the folder where it is missing.

        Raises EmbeddedRedisError if it can't be written, or if others own or can write it.
        """
        folder = cls(root.expanduser().absolute())
        check_ownership(folder.root)
        try:
            folder.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = folder.root / f".writable-{os.getpid()}"
            probe.touch(mode=0o600)
            probe.unlink(missing_ok=True)
            if not (folder.root / ".gitignore").exists():
                _write_private(folder.root / ".gitignore", "*\n")  # it holds a password
        except OSError as error:
            raise EmbeddedRedisError(
                f"The data folder {folder.root} cannot be written: {error.strerror}. "
                "Fix: name a folder that you own."
            ) from error
        return folder

    @property
    def start_lock(self) -> Path:
        """Held alone by a process that starts or leaves the server."""
        return self.root / "start.lock"

    @property
    def users_lock(self) -> Path:
        """Shared by all users of the server; held alone by the guardian that ends it."""
        return self.root / "users.lock"

    @property
    def guardian_lock(self) -> Path:
        """Held alone by the guardian of the server."""
        return self.root / "guardian.lock"

    @property
    def server_lock(self) -> Path:
        """Held alone by the server's process, without its knowledge, for as long as it lives."""
        return self.root / "server.lock"

    @property
    def config(self) -> Path:
        """The server's configuration file."""
        return self.root / "redis.conf"

    @property
    def log(self) -> Path:
        """The server's log since its last start; the one before is next to it."""
        return self.root / "redis.log"

    @property
    def has_data(self) -> bool:
        """Whether a server has written here before."""
        return (self.root / "appendonlydir").is_dir()

    @property
    def is_rewritten(self) -> bool:
        """Whether the folder's server is rewriting its append-only file."""
        return any(self.root.glob("temp-rewriteaof-*"))

    def read_address(self) -> ServerAddress | None:
        """Return the address of the last start, if there was one.

        Raises EmbeddedRedisError where others own or can write the folder, or it was not us who
        wrote the address.
        """
        check_ownership(self.root)
        try:
            return ServerAddress.of(json.loads((self.root / "address.json").read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise EmbeddedRedisError(
                f"{self.root / 'address.json'} is damaged. Fix: delete that one file; the data "
                "is kept."
            ) from error

    def write_start(self, address: ServerAddress) -> None:
        """Write what a start needs: the configuration, the address, and an empty log.

        Removes half-written files of killed servers and commands: those of a rewrite are as large
        as the data. No server may run.
        """
        for pattern in _LEFTOVERS:
            for left in self.root.glob(pattern):
                left.unlink(missing_ok=True)
        if self.log.exists():
            self.log.replace(self.root / "redis.log.1")
        _write_private(self.log, "")
        _write_private(self.config, render_config(self.root, self.log, address))
        _write_private(self.root / "address.json", json.dumps(asdict(address)))

    def log_tail(self, lines: int = 8) -> str:
        """Return the log's last lines."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""


def render_config(root: Path, log: Path, address: ServerAddress) -> str:
    """Return the server's configuration: durable within a second, evicts nothing, loopback only.

    A stream takes memory by the node; a run's events are few, so its nodes are small. The
    append-only file is not rewritten until a long-lived user requests it: a rewrite at each start
    would be lost work, since the end of a short command interrupts it.
    """
    settings = {
        "bind": "127.0.0.1",
        "port": str(address.port),
        "protected-mode": "yes",
        "requirepass": _quoted(address.password),
        "daemonize": "no",
        "dir": _quoted(str(root)),
        "logfile": _quoted(str(log)),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "aof-load-truncated": "yes",
        "auto-aof-rewrite-percentage": "0",
        "save": '""',
        "maxmemory-policy": "noeviction",
        "stream-node-max-bytes": "1024",
        "hash-max-listpack-value": "512",
        "hash-max-listpack-entries": "128",
    }
    lines = [f"{name} {value}" for name, value in settings.items()]
    lines += [f'rename-command {command} ""' for command in _DISABLED]
    return "".join(f"{line}\n" for line in lines)


def _quoted(text: str) -> str:
    return '"' + "".join(_escaped(byte) for byte in os.fsencode(text)) + '"'


def _escaped(byte: int) -> str:
    plain = 0x20 <= byte < 0x7F and byte not in b'"\\'  # noqa: PLR2004 - printable ASCII
    return chr(byte) if plain else f"\\x{byte:02x}"


def _write_private(path: Path, text: str) -> None:
    """Replace the file in one step, so that no reader sees half of it."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    fresh.replace(path)
