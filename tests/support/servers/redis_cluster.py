"""A real Redis Cluster for tests: masters and replicas, private, with slots that can be moved."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import redis
from support.deadlines import wait_until
from support.servers.redis_servers import RedisServer, dealt, is_free, short_folder

_PORTS = range(7_000, 9_900)
_BUS = 10_000
_CALM, _ALERT = 15_000, 1_500
"""Milliseconds until a silent node counts as dead; on a busy machine all are silent for a while."""
_LONG = 60.0
SLOTS = 16_384


def _cluster_port() -> int:
    """Return a port that is free, and so is the cluster's bus above it."""
    return next(port for port in dealt(_PORTS) if is_free(port) and is_free(port + _BUS))


class RedisCluster:
    """Masters that share the slots, and `replicas` of the first of them. Ended by `end`."""

    def __init__(
        self, folder: Path, *, masters: int = 3, replicas: int = 0, **settings: str
    ) -> None:
        self._password = settings.get("requirepass")
        if self._password:
            settings["masterauth"] = self._password
        self.servers: list[RedisServer] = []
        try:
            for number in range(masters + replicas):
                self.servers.append(self._server(folder, number, settings))
            self.masters, self.replicas = self.servers[:masters], self.servers[masters:]
            self._form()
        except BaseException:
            self.end()
            raise
        for server in self.servers:
            server.on_strike = self._be_alert

    def _form(self) -> None:
        """Make one cluster of the servers; return when it is well."""
        first, count = self.masters[0], len(self.masters)
        for number, server in enumerate(self.masters):
            begin, end = SLOTS * number // count, SLOTS * (number + 1) // count - 1
            self.ask(server, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            self.ask(server, "CLUSTER", "ADDSLOTSRANGE", begin, end)
        for server in self.servers[1:]:
            self.ask(server, "CLUSTER", "MEET", "127.0.0.1", first.port)
        wait_until(self._all_know_all, within=_LONG, what="nodes that know each other")
        for replica in self.replicas:
            self.ask(replica, "CLUSTER", "REPLICATE", self.id_of(first))
        wait_until(self._is_well, within=_LONG, what="a cluster that is well")

    @staticmethod
    def _server(folder: Path, number: int, settings: dict[str, str]) -> RedisServer:
        own = folder / f"n{number}"
        own.mkdir()
        server = RedisServer(
            own,
            **{
                "cluster_enabled": "yes",
                "cluster_node_timeout": str(_CALM),
                "cluster_require_full_coverage": "no",
                "repl_diskless_sync_delay": "0",
                **settings,
            },
        )
        server.port = _cluster_port()
        return server.start()

    def _be_alert(self) -> None:
        """Let the nodes soon notice that one of them is away, from here on."""
        for server in self.servers:
            server.on_strike = None
            with contextlib.suppress(redis.RedisError):
                self.ask(server, "CONFIG", "SET", "cluster-node-timeout", _ALERT)

    @property
    def url(self) -> str:
        """The address as Stepfleet writes it: two of the nodes."""
        user = f":{quote(self._password, safe='')}@" if self._password else ""
        places = ",".join(f"127.0.0.1:{one.port}" for one in self.servers[:2])
        return f"redis+cluster://{user}{places}"

    def ask(self, server: RedisServer, *command: object) -> object:
        """Return what one node answers."""
        with self.client(server) as client:
            return client.execute_command(*command)

    def client(self, server: RedisServer) -> redis.Redis:
        """Return a client of one node."""
        return redis.Redis(port=server.port, password=self._password, decode_responses=True)

    def peek(self, server: RedisServer, key: str) -> object:
        """Return a key's content on this node, whoever owns its slot; None where it has none."""
        kinds: dict[str, tuple[object, ...]] = {
            "hash": ("HGETALL", key),
            "zset": ("ZRANGE", key, 0, -1, "WITHSCORES"),
            "stream": ("XRANGE", key, "-", "+"),
        }
        with self.client(server) as client, contextlib.suppress(redis.exceptions.AskError):
            client.execute_command("ASKING")
            kind = client.execute_command("TYPE", key)
            client.execute_command("ASKING")
            return None if kind == "none" else client.execute_command(*kinds[str(kind)])
        return None

    def id_of(self, server: RedisServer) -> str:
        """Return a node's id in the cluster."""
        return str(self.ask(server, "CLUSTER", "MYID"))

    def owner(self, slot: int) -> RedisServer:
        """Return the running master that says the slot is its own."""
        for server in self.servers:
            if server.running and slot in self.slots_of(server):
                return server
        raise AssertionError(f"no running node owns the slot {slot}")

    def owner_of_key(self, key: str) -> RedisServer:
        """Return the running master that has the slot of a key."""
        slot = self.ask(self.masters[0], "CLUSTER", "KEYSLOT", key)
        assert isinstance(slot, int)
        return self.owner(slot)

    def another(self, than: RedisServer) -> RedisServer:
        """Return another master."""
        return next(one for one in self.masters if one is not than)

    def begin_move(self, slot: int, to: RedisServer) -> None:
        """Let the slot be on its way: its keys may be on either node."""
        source = self.owner(slot)
        self.ask(to, "CLUSTER", "SETSLOT", slot, "IMPORTING", self.id_of(source))
        self.ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", self.id_of(to))

    def move_keys(self, slot: int, to: RedisServer, *only: str) -> int:
        """Move the slot's keys (or only those); return how many."""
        source = self.owner(slot)
        moved = 0
        while names := only or tuple(self._keys_in(source, slot)):
            target = ("127.0.0.1", to.port, "", 0, 5000)
            auth = ("AUTH", self._password) if self._password else ()
            self.ask(source, "MIGRATE", *target, *auth, "KEYS", *names)
            moved += len(names)
            if only:
                break
        return moved

    def end_move(self, slot: int, to: RedisServer) -> None:
        """Give the slot to its new owner, everywhere."""
        source, new = self.owner(slot), self.id_of(to)
        for server in (to, source, *(one for one in self.masters if one not in (to, source))):
            self.ask(server, "CLUSTER", "SETSLOT", slot, "NODE", new)

    def move(self, slot: int, to: RedisServer) -> int:
        """Move a slot with all its keys; return how many keys."""
        if self.owner(slot) is to:
            return 0
        self.begin_move(slot, to)
        moved = self.move_keys(slot, to)
        self.end_move(slot, to)
        return moved

    def replicated(self) -> None:
        """Return when the first master's replicas have what it has."""

        def is_in_step() -> bool:
            told = self._replication(self.masters[0])
            offsets = [told[f"slave{n}"]["offset"] for n in range(len(self.replicas))]
            return set(offsets) == {told["master_repl_offset"]}

        wait_until(is_in_step, within=_LONG, what="replicas in step")

    def calls_of(self, server: RedisServer, command: str) -> int:
        """Return how often a node was given a command."""
        with self.client(server) as client:
            told = client.info("commandstats")
        return int(told.get(f"cmdstat_{command}", {}).get("calls", 0))

    def flush(self) -> None:
        """Delete every key."""
        for server in self.masters:
            self.ask(server, "FLUSHALL")

    def end(self) -> None:
        for server in self.servers:
            server.on_strike = None
            server.kill()

    def _keys_in(self, server: RedisServer, slot: int) -> list[str]:
        found = self.ask(server, "CLUSTER", "GETKEYSINSLOT", slot, 100)
        assert isinstance(found, list)
        return found

    def slots_of(self, server: RedisServer) -> set[int]:
        """Return the slots that a node says are its own."""
        with self.client(server) as client:
            nodes = str(client.execute_command("CLUSTER", "NODES"))
        (own,) = [line for line in nodes.splitlines() if "myself" in line]
        if "master" not in own:
            return set()
        ranges = [part for part in own.split()[8:] if not part.startswith("[")]
        bounds = [tuple(map(int, part.split("-"))) for part in ranges]
        return {slot for one in bounds for slot in range(one[0], one[-1] + 1)}

    def _facts(self, server: RedisServer) -> dict[str, str]:
        told = str(self.ask(server, "CLUSTER", "INFO"))
        return dict(line.split(":", 1) for line in told.split())

    def _all_know_all(self) -> bool:
        return all(
            int(self._facts(one)["cluster_known_nodes"]) == len(self.servers)
            and "handshake" not in str(self.ask(one, "CLUSTER", "NODES"))
            for one in self.servers
        )

    def _is_well(self) -> bool:
        for server in self.servers:
            if self._facts(server)["cluster_state"] != "ok":
                return False
        told = self._replication(self.masters[0])
        online = [told.get(f"slave{n}", {}).get("state") for n in range(len(self.replicas))]
        return all(state == "online" for state in online)

    def _replication(self, server: RedisServer) -> dict[str, Any]:
        with self.client(server) as client:
            return dict(client.info("replication"))


@contextlib.contextmanager
def redis_cluster(**settings: str | int) -> Iterator[RedisCluster]:
    """Make a cluster of three masters, ended afterwards."""
    with short_folder() as folder:
        cluster = RedisCluster(folder, **settings)  # type: ignore[arg-type]
        try:
            yield cluster
        finally:
            cluster.end()
