"""A real, private RabbitMQ for tests: a node, and the port mapper that it needs."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

from support.deadlines import wait_until
from support.servers.redis_servers import free_port

_BINARY = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")


class RabbitServer:
    """One RabbitMQ node with its data in a folder. Ended by `end`, with its port mapper."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = free_port()
        self._mapper_port = free_port()
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        """The address as Celery writes it."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    def start(self) -> "RabbitServer":
        """Start it; return when it accepts connections."""
        binary = str(_BINARY) if _BINARY.exists() else shutil.which("rabbitmq-server")
        mapper = shutil.which("epmd")
        assert binary, "this test needs rabbitmq-server (apt-get install rabbitmq-server)"
        assert mapper, "this test needs epmd (it comes with Erlang)"
        folder = self._folder
        (folder / "plugins").write_text("[].")
        (folder / "env.conf").touch()
        env = {
            **os.environ,
            "HOME": str(folder),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._mapper_port),
            "RABBITMQ_NODENAME": f"t{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "env.conf"),
        }
        with (folder / "out.log").open("wb") as out:
            # In the foreground: a node that finds none starts one that nobody ends.
            self._begin([mapper], env, out.fileno())
            wait_until(lambda: _listens(self._mapper_port), within=60, what="epmd")
            self._begin([binary], env, out.fileno())
        wait_until(self._is_up, within=100, what="RabbitMQ")
        return self

    def end(self) -> None:
        """End the node and its port mapper."""
        for process in reversed(self._processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=60)
        self._processes.clear()

    def restart(self, *, empty: bool = False) -> None:
        """Kill it, and start it with the same port, and its data unless that is to be lost."""
        self.end()
        if empty:
            shutil.rmtree(self._folder / "data")
        self.start()

    def _begin(self, command: list[str], env: dict[str, str], out: int) -> None:
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        self._processes.append(process)

    def _is_up(self) -> bool:
        log = (self._folder / "out.log").read_text(errors="replace")
        assert self._processes[-1].poll() is None, f"RabbitMQ ended at its start:\n{log[-2000:]}"
        return "completed with" in log and _listens(self.port)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
