"""Real, private Redis servers for tests: started, killed, stopped and restarted at will.

Each keeps its data in a folder of its own, with the append-only file on and nothing evicted, and
listens on a unix socket and on a loopback port. The port lies below 32768, since a client that
tries a dead port among the ephemeral ones again and again can end up connected to itself; and
where nobody else takes it while its server is away: below the model servers' ports, and in no
other test process's share.
"""

import contextlib
import functools
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import redis
from support.deadlines import wait_until
from support.workers.frozen import freeze

_PORTS = range(10_000, 17_000)
_LONG = 60.0
_DEFAULTS = {
    "appendonly": "yes",
    "appendfsync": "everysec",
    "maxmemory-policy": "noeviction",
    "save": '""',
    "bind": "127.0.0.1",
}


@functools.cache
def dealt(ports: range) -> Iterator[int]:
    """Deal this test process's share of the ports, in any order, again from the start at its end.

    No port comes twice in a row or in two processes of one pytest run: it may be bound much later.
    """
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    share = ports[number % count :: count]
    # Hypothesis gives every process the same seed.
    return itertools.cycle(random.SystemRandom().sample(share, len(share)))


def free_port() -> int:
    """Return a loopback port below 32768 on which nothing listens."""
    return next(port for port in dealt(_PORTS) if is_free(port))


def is_free(port: int) -> bool:
    """Tell whether nobody has bound the loopback port."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def listener(backlog: int = 128) -> socket.socket:
    """Listen on a loopback port that was free."""
    while True:
        with contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1", free_port()), backlog=backlog)


def deaf(listening: socket.socket) -> None:
    """Close a socket of `listener`, and wake who waits in `accept`, which would take one more."""
    with contextlib.suppress(OSError):
        listening.shutdown(socket.SHUT_RDWR)
    listening.close()


class RedisServer:
    """One redis-server process and its folder; settings are names and values of redis.conf.

    `on_strike` is called before the server is ended or frozen.
    """

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.socket_path = folder / "redis.sock"
        self.log = folder / "redis.log"
        self._settings = {**_DEFAULTS, **{k.replace("_", "-"): v for k, v in settings.items()}}
        self._process: subprocess.Popen[bytes] | None = None
        self.on_strike: Callable[[], None] | None = None

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
        wait_until(self._answers, within=_LONG, what="an answer of redis-server")
        return self

    def _answers(self) -> bool:
        assert self.running, f"redis-server ended at its start:\n{self.log.read_text()[-2000:]}"
        # By the socket: at the port somebody else may answer. It is opened behind the port.
        with contextlib.closing(redis.Redis.from_url(self.unix_url)) as client:
            try:
                return bool(client.ping())
            except redis.AuthenticationError:
                return True
            except (redis.ConnectionError, redis.BusyLoadingError, redis.TimeoutError):
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
        self._strike()
        freeze(self._process.pid)

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

    def _strike(self) -> None:
        if self.on_strike is not None:
            self.on_strike()

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            self._strike()
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(how)
        self._process.wait(timeout=_LONG)
        self._process = None


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """Make a folder whose path is short enough for unix sockets; delete it afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="sf-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
