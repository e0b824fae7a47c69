"""Real, private Redis servers for tests: started, killed, stopped and restarted at will.

Each keeps its data in a folder of its own, with the append-only file on and nothing evicted, and
listens on a unix socket and on a loopback port. The port lies below 32768, since a client that
tries a dead port among the ephemeral ones again and again can end up connected to itself.
"""

import contextlib
import random
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import redis
from deadlines import wait_until

_PORTS = range(20_000, 32_767)
_DEFAULTS = {
    "appendonly": "yes",
    "appendfsync": "everysec",
    "maxmemory-policy": "noeviction",
    "save": '""',
    "bind": "127.0.0.1",
}


def free_port() -> int:
    """Return a loopback port below 32768 on which nothing listens."""
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class RedisServer:
    """One redis-server process and its folder; settings are names and values of redis.conf."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.socket_path = folder / "redis.sock"
        self.log = folder / "redis.log"
        self._settings = {**_DEFAULTS, **{k.replace("_", "-"): v for k, v in settings.items()}}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The address on the loopback port, database 0."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def unix_url(self) -> str:
        """The address on the unix socket, database 0."""
        return f"unix://{self.socket_path}?db=0"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server was not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> "RedisServer":
        """Start the server on the folder's data; return when it answers."""
        assert not self.running, "the server is already running"
        binary = shutil.which("redis-server") or shutil.which("valkey-server")
        assert binary, "the tests need redis-server on PATH (apt-get install redis-server)"
        settings = {
            **self._settings,
            "port": str(self.port),
            "unixsocket": str(self.socket_path),
            "dir": str(self.folder),
            "logfile": str(self.log),
        }
        config = self.folder / "redis.conf"
        config.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        self._process = subprocess.Popen([binary, str(config)], stdin=subprocess.DEVNULL)
        wait_until(self._answers, within=20, what="an answer of redis-server")
        return self

    def _answers(self) -> bool:
        assert self.running, f"redis-server ended at its start:\n{self.log.read_text()[-2000:]}"
        with contextlib.closing(redis.Redis.from_url(self.url)) as client:
            try:
                return bool(client.ping())
            except redis.AuthenticationError:
                return True
            except (redis.ConnectionError, redis.BusyLoadingError):
                return False

    def stop(self) -> None:
        """End it with SIGTERM: everything acknowledged is on disk afterwards."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it with SIGKILL: with appendfsync everysec nothing that reached the OS is lost."""
        self._end(signal.SIGKILL)

    def promote(self, port: int) -> None:
        """Make a replica a master that listens on another port."""
        self._settings.pop("replicaof", None)
        with contextlib.closing(redis.Redis.from_url(self.unix_url)) as client:
            client.replicaof("NO", "ONE")
            client.config_set("port", port)
        self.port = port

    def restart(self) -> None:
        """Stop it where it runs, and start it with the same port and data."""
        self.stop()
        self.start()

    def freeze(self) -> None:
        """Stop the process in its tracks (SIGSTOP): connections stay open and get no answer."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen process go on (SIGCONT)."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def flush(self) -> None:
        """Delete every key, script and function."""
        with contextlib.closing(redis.Redis.from_url(self.unix_url)) as client:
            client.flushall()
            client.script_flush()
            client.function_flush()

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(how)
        self._process.wait(timeout=20)
        self._process = None


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """Make a folder whose path is short enough for unix sockets; delete it afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="sf-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
