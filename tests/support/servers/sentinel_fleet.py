"""A real Redis behind Sentinels for tests: a master, replicas, and three Sentinels, all private."""

import contextlib
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import redis
from support.deadlines import wait_until
from support.servers.redis_servers import RedisServer, free_port, short_folder

SERVICE = "fleet"
_QUORUM = 2
_CALM, _ALERT = 60_000, 1_000
"""Milliseconds until a silent server counts as down; on a busy machine all are silent at times."""
_LONG = 100.0


class SentinelProcess:
    """One redis-sentinel process that watches one service."""

    def __init__(self, folder: Path, number: int, master_port: int, *settings: str) -> None:
        own = [line.split()[1] for line in settings if line.startswith("requirepass")]
        self._password = own[0] if own else None
        self.port = free_port()
        self._log = folder / f"sentinel-{number}.log"
        config = folder / f"sentinel-{number}.conf"
        lines = (
            f"port {self.port}",
            "bind 127.0.0.1",
            f"dir {folder}",
            f"logfile {self._log}",
            f"sentinel monitor {SERVICE} 127.0.0.1 {master_port} {_QUORUM}",
            f"sentinel down-after-milliseconds {SERVICE} {_CALM}",
            f"sentinel failover-timeout {SERVICE} 4000",
            f"sentinel parallel-syncs {SERVICE} 1",
            *settings,
        )
        config.write_text("\n".join(lines) + "\n")
        binary = shutil.which("redis-server") or shutil.which("valkey-server")
        assert binary, "the tests need redis-server on PATH (apt-get install redis-server)"
        command = [binary, str(config), "--sentinel"]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def client(self) -> redis.Redis:
        return redis.Redis(
            port=self.port, password=self._password, decode_responses=True, socket_timeout=30
        )

    def end(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


class SentinelFleet:
    """A master, replicas of it, and three Sentinels, begun by `start` and ended by `end`."""

    def __init__(
        self, folder: Path, replicas: int, sentinels: tuple[str, ...], /, **settings: str
    ) -> None:
        self._password = settings.get("requirepass")
        if self._password:
            settings["masterauth"] = self._password
            sentinels = (*sentinels, f"sentinel auth-pass {SERVICE} {self._password}")
        self._folder = folder
        self._told = sentinels
        self.sentinels: list[SentinelProcess] = []
        self.servers: list[RedisServer] = []
        for number in range(1 + replicas):
            own = folder / f"s{number}"
            own.mkdir()
            of = {"replicaof": f"127.0.0.1 {self.servers[0].port}"} if number else {}
            more = {"repl-diskless-sync-delay": "0", **of, **settings}
            self.servers.append(RedisServer(own, **more))

    def start(self) -> "SentinelFleet":
        """Start everything; return when all of it knows each other."""
        for server in self.servers:
            server.start()
        wait_until(self._is_in_step, within=_LONG, what="replicas in step")
        port = self.servers[0].port
        for number in range(3):
            self.sentinels.append(SentinelProcess(self._folder, number, port, *self._told))
        wait_until(self._sees_all, within=_LONG, what="Sentinels that know each other")
        for server in self.servers:
            server.on_strike = self._be_alert
        return self

    @property
    def url(self) -> str:
        """The address as Stepfleet writes it."""
        user = f":{self._password}@" if self._password else ""
        places = ",".join(f"127.0.0.1:{one.port}" for one in self.sentinels)
        return f"sentinel://{user}{places}/{SERVICE}/0"

    @property
    def master(self) -> RedisServer:
        """The server that the Sentinels call master."""
        ports = [self._told_by(one) for one in self.sentinels]
        port = max(set(ports), key=ports.count)
        return next(one for one in self.servers if one.port == port)

    @property
    def replica(self) -> RedisServer:
        """A running server that is not the master."""
        master = self.master
        return next(one for one in self.servers if one is not master and one.running)

    def client(self, server: RedisServer) -> redis.Redis:
        """Return a client of one server."""
        return redis.Redis(port=server.port, password=self._password, decode_responses=True)

    def wait_for_another(self, than: RedisServer) -> RedisServer:
        """Return the new master once all Sentinels name one and it takes writes."""

        def is_promoted() -> bool:
            ports = {self._told_by(one) for one in self.sentinels}
            if len(ports) != 1 or than.port in ports:
                return False
            with contextlib.suppress(redis.RedisError), self.client(self.master) as client:
                return bool(client.role()[0] == "master")
            return False

        wait_until(is_promoted, within=_LONG, what="a failover")
        return self.master

    def end(self) -> None:
        for sentinel in self.sentinels:
            sentinel.end()
        for server in self.servers:
            server.on_strike = None
            server.kill()

    def _be_alert(self) -> None:
        """Let the Sentinels soon notice that a server is away, from here on."""
        for server in self.servers:
            server.on_strike = None
        for sentinel in self.sentinels:
            with contextlib.suppress(redis.RedisError), sentinel.client() as client:
                client.execute_command(
                    "SENTINEL", "SET", SERVICE, "down-after-milliseconds", _ALERT
                )

    def _told_by(self, sentinel: SentinelProcess) -> int:
        with sentinel.client() as client:
            return int(client.sentinel_get_master_addr_by_name(SERVICE)[1])

    def _is_in_step(self) -> bool:
        with self.client(self.servers[0]) as client:
            told = client.info("replication")
        online = [told.get(f"slave{n}", {}).get("state") for n in range(len(self.servers) - 1)]
        return all(state == "online" for state in online)

    def _sees_all(self) -> bool:
        for sentinel in self.sentinels:
            with contextlib.suppress(redis.RedisError), sentinel.client() as client:
                state = client.sentinel_master(SERVICE)
                others, replicas = state["num-other-sentinels"], state["num-slaves"]
                if others >= len(self.sentinels) - 1 and replicas >= len(self.servers) - 1:
                    continue
            return False
        return True


@contextlib.contextmanager
def sentinel_fleet(*, sentinels: tuple[str, ...] = (), **settings: str) -> Iterator[SentinelFleet]:
    """A master, one replica and three Sentinels, ended afterwards."""
    with short_folder() as folder:
        fleet = SentinelFleet(folder, 1, sentinels, **settings)
        try:
            yield fleet.start()
        finally:
            fleet.end()
