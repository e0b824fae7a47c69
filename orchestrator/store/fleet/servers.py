"""Reads the facts of Redis servers, and judges what about them endangers runs. Reads no run."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, TypeVar, cast

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    RedisClusterException,
    RedisError,
)
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError

from stepfleet.orchestrator.errors import AgentException, ConfigurationError, StoreError
from stepfleet.orchestrator.redis_client.clients import plain_cluster_client
from stepfleet.orchestrator.redis_client.cluster import Topology, slot_of
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.redis_client.sentinel import master_client, sentinel_options
from stepfleet.orchestrator.redis_client.urls import (
    is_cluster,
    is_sentinel,
    parse_cluster,
    parse_sentinel,
)
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.fleet.quarantine import about_entries, reasons
from stepfleet.orchestrator.store.keys import Keys

_CONNECT_SECONDS = 3.0

T = TypeVar("T")
Client = redis.Redis | RedisCluster
OLDEST = (7, 0)
_WORST: dict[str, Callable[[Any], Any]] = {
    "redis_version": lambda version: version_of(str(version)),
    "aof_enabled": lambda enabled: str(enabled) != "0",
    "maxmemory_policy": lambda policy: policy == "noeviction",
    "aof_last_write_status": lambda status: status == "ok",
    "rdb_last_bgsave_status": lambda status: status == "ok",
    "full": lambda full: not full,
}
"""How to rank a judged fact: the worst server has the least."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A server's version, the settings that matter, and whether it takes writes.

    None where it does not report them. `full`: its memory is used up; `writes`: to its disk.
    """

    version: str | None = None
    append_only: bool | None = None
    eviction: str | None = None
    full: bool | None = None
    writes: bool | None = None

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Self:
        """Return the facts in a reply to `INFO`. Valkey reports the Redis that it stands for."""
        version, append_only = info.get("redis_version"), info.get("aof_enabled")
        return cls(
            version=None if version is None else str(version),
            append_only=None if append_only is None else str(append_only) != "0",
            eviction=info.get("maxmemory_policy"),
            full=info.get("full", _is_full(info)),
            writes=_writes(info),
        )


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """A cluster's state. `shards` is the number of the store's shards on each master."""

    sound: bool
    masters: int
    replicas: int
    alone: tuple[str, ...] = ()
    """Masters without a reachable replica."""
    unserved: int = 0
    moving: int = 0
    shards: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RedisFacts:
    """A server's or cluster's facts, and the store's own in it; `shards` is None without a store.

    `refusals` counts the reasons of the messages in quarantine.
    """

    server: ServerFacts
    shards: int | None
    quarantined: int
    refusals: dict[str, int] = field(default_factory=dict)
    cluster: ClusterFacts | None = None


def redis_facts(url: str, *, prefix: str = "") -> RedisFacts:
    """Return the facts of the server or cluster at `url`, and of the store with that prefix.

    Raises as `query`.
    """
    return query(url, partial(_facts, prefix))


def refused_messages(urls: Iterable[str], prefix: str = "") -> list[dict[str, Any]]:
    """Return the facts of the messages in quarantine, the newest first.

    `urls` are of the store and the broker; only a broker on Redis has a quarantine. Raises as
    `query`.
    """
    found = [
        one for url in urls if is_redis(url) for one in query(url, partial(_quarantine, prefix))
    ]
    return sorted(found, key=lambda one: -float(one["at"]))


def is_redis(url: str) -> bool:
    """Return whether a broker's URL is one of Redis."""
    schemes = ("redis://", "rediss://", "unix://")
    return is_cluster(url) or is_sentinel(url) or url.startswith(schemes)


def query(url: str, read: Callable[[Client], T], *, seconds: float = _CONNECT_SECONDS) -> T:
    """Return what `read` returns for a client; `seconds` is how long each node may be silent.

    Raises `ConfigurationError` for an unusable URL or refused credentials, `StoreError` for an
    unreachable server; both name the fix.
    """
    try:
        place = _place(url)
    except ValueError as error:
        msg = f"STEPFLEET_REDIS_URL cannot be used ({error}); write redis://host:6379/0"
        raise ConfigurationError(msg) from None
    try:
        with contextlib.closing(_client(url, seconds)) as client:
            return read(client)
    except (AuthenticationError, NoPermissionError) as error:
        msg = (
            f"Redis at {place} refuses the credentials: {error}; put the right ones into "
            f"STEPFLEET_REDIS_URL ({url.partition('://')[0]}://USER:PASSWORD@host:6379)"
        )
        raise ConfigurationError(msg) from None
    # Where no node of a cluster answers, the client's exception is not a RedisError.
    except (RedisError, RedisClusterException, OSError) as error:
        lacks = isinstance(error, MasterNotFoundError)
        why = "no Sentinel names a master" if lacks else str(error).rstrip(".")
        msg = (
            f"Redis at {place} cannot be reached: {why}; start it, or correct STEPFLEET_REDIS_URL "
            "(unset it to use a private server)"
        )
        raise StoreError(msg) from None


def infos(client: Client, *sections: str) -> list[dict[str, Any]]:
    """Return sections of `INFO`: one server's, or each master's of a cluster.

    Each section in a call of its own: a server before Redis 7 refuses several in one.
    """
    if isinstance(client, RedisCluster):
        return infos_of_masters(client, *sections)
    return [{name: value for one in sections for name, value in client.info(one).items()}]


def _client(url: str, seconds: float) -> Client:
    plain: dict[str, Any] = {
        "decode_responses": True,
        "encoding_errors": "replace",  # messages in quarantine are any bytes
    }
    if is_sentinel(url):
        return cast("redis.Redis", master_client(url, seconds=seconds, **plain))
    plain |= {"socket_connect_timeout": seconds, "socket_timeout": seconds}
    if is_cluster(url):
        return plain_cluster_client(url, retry=Retry(NoBackoff(), 1), **plain)
    return redis.Redis.from_url(url, retry=None, **plain)


def _place(url: str) -> str:
    """Return where a URL leads, without user or password. Raises `ValueError`."""
    if is_cluster(url):
        return parse_cluster(url).location
    if is_sentinel(url):
        return f"{parse_sentinel(url).service} (behind Sentinel)"
    options = redis.ConnectionPool.from_url(url).connection_kwargs
    if "path" in options:
        return str(options["path"])
    return f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"


def _facts(prefix: str, client: Client) -> RedisFacts:
    stored = cast("str | None", client.get(prefix + keys.SHARDS))
    shards = int(stored) if stored else None
    cluster = None
    if isinstance(client, RedisCluster):
        cluster = cluster_facts(client, shards or keys.Keys().shards)
    refused = _quarantine(prefix, client)
    return RedisFacts(
        server=ServerFacts.of(worst_of(infos(client, "server", "persistence", "memory"))),
        shards=shards,
        quarantined=len(refused),
        refusals=reasons(refused),
        cluster=cluster,
    )


def _quarantine(prefix: str, client: Client) -> list[dict[str, Any]]:
    """Return the facts of the messages in quarantine, the newest first."""
    key = prefix + keys.QUARANTINE
    if client.type(key) != "list":
        return []
    return about_entries(cast("list[str]", client.lrange(key, 0, -1)))


@dataclass(frozen=True, slots=True)
class SentinelFacts:
    """The state of Sentinels: how many the URL names, how many answer, and the master's replicas.

    `known` counts the Sentinels that know each other, `quorum` how many must agree that the
    master is down.
    """

    named: int
    answering: int
    known: int
    quorum: int
    replicas: int


def sentinel_facts(url: str) -> SentinelFacts:
    """Return the facts of the Sentinels of `url`, within a second each."""
    parsed = parse_sentinel(url)
    once = Retry(NoBackoff(), 0)
    states: list[Any] = []
    for host, port in parsed.sentinels:
        client = redis.Redis(host=host, port=port, retry=once, **sentinel_options(parsed))
        with contextlib.closing(client), contextlib.suppress(RedisError, OSError):
            states.append(client.sentinel_master(parsed.service))
    return SentinelFacts(
        named=len(parsed.sentinels),
        answering=len(states),
        known=max((int(one["num-other-sentinels"]) + 1 for one in states), default=0),
        quorum=max((int(one["quorum"]) for one in states), default=0),
        replicas=max((int(one["num-slaves"]) for one in states), default=0),
    )


def infos_of_masters(client: Any, *sections: str) -> list[dict[str, Any]]:
    """Return sections of each master's `INFO`, read one by one as of a single server."""
    found: list[dict[str, Any]] = []
    for node in client.get_primaries():
        replies = (client.info(one, target_nodes=node) for one in sections)
        found.append({name: value for reply in replies for name, value in reply.items()})
    return found


def cluster_facts(client: Any, shards: int) -> ClusterFacts:
    """Return the facts of a cluster whose store has `shards` shards."""
    primaries: list[ClusterNode] = client.get_primaries()
    first = primaries[0]
    topology = Topology.parse(
        (first.host, first.port), _cluster(client, first, "SLOTS"), _cluster(client, first, "INFO")
    )
    views = [_nodes(_cluster(client, node, "NODES")) for node in primaries]
    masters, replicas = _roles(views[0])
    followed = {one.master for one in replicas}
    served = [topology.owners[slot_of(Keys(shards).due(one))] for one in range(shards)]
    return ClusterFacts(
        sound=topology.sound,
        masters=len(masters),
        replicas=len(replicas),
        alone=tuple(one.address for one in masters if one.id not in followed),
        unserved=sum(owner is None for owner in topology.owners),
        moving=sum("->-" in slot for view in views for node in view for slot in node.slots),
        shards=tuple(served.count(master) for master in topology.masters),
    )


@dataclass(frozen=True, slots=True)
class _Node:
    """A line of CLUSTER NODES; only a node's own line has its migrating slots."""

    id: str
    address: str
    flags: tuple[str, ...]
    master: str
    slots: tuple[str, ...]


def _nodes(text: str) -> list[_Node]:
    lines = [line.split() for line in text.splitlines()]
    return [
        _Node(
            id=line[0],
            address=line[1].partition("@")[0],
            flags=tuple(line[2].split(",")),
            master=line[3],
            slots=tuple(line[8:]),
        )
        for line in lines
    ]


def _roles(view: list[_Node]) -> tuple[list[_Node], list[_Node]]:
    """Return the masters with slots, and the reachable replicas."""
    masters = [one for one in view if "master" in one.flags and one.slots]
    reachable = [one for one in view if not {"fail", "noaddr", "handshake"} & set(one.flags)]
    return masters, [one for one in reachable if "slave" in one.flags]


def _cluster(client: Any, node: ClusterNode, command: str) -> Any:
    return client.execute_command("CLUSTER", command, target_nodes=node)


@dataclass(frozen=True, slots=True)
class HealthFinding:
    """A defect of a set-up and its fix; `about` names the subject. `stops`: work stands still."""

    about: str
    found: str
    fix: str
    stops: bool = False

    @property
    def text(self) -> str:
        """The finding as one message."""
        return f"{self.found}. Fix: {self.fix}"


async def server_info(connection: Connection) -> dict[str, Any]:
    """Return the reply of the server to `INFO`; empty where that is forbidden.

    Of a cluster's masters each fact is that of the one which is worst off.
    """
    try:
        parts = await asyncio.gather(
            *(connection.everywhere("INFO", part) for part in ("server", "persistence", "memory"))
        )
    except (RedisError, AgentException):
        return {}
    servers = [
        {name: value for part in server for name, value in part.items()}
        for server in zip(*parts, strict=False)
    ]
    return worst_of(servers)


def worst_of(servers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one server's facts for several: those that are judged as the worst server has them."""
    servers = [{**one, "full": _is_full(one)} if "maxmemory" in one else one for one in servers]
    found = dict(servers[0])
    for name, rank in _WORST.items():
        values = [server[name] for server in servers if server.get(name) is not None]
        if values:
            found[name] = min(values, key=rank)
    return found


def warnings(info: Mapping[str, Any]) -> list[str]:
    """Return the findings about a server as messages; nothing for a sound one."""
    return [finding.text for finding in health_findings(ServerFacts.of(info))]


def health_findings(facts: ServerFacts) -> list[HealthFinding]:
    """Return the findings about a server; nothing for a sound one."""
    found = []
    numbers = version_of(facts.version or "")
    if numbers and numbers < OLDEST:
        found.append(
            HealthFinding(
                "version", f"Redis is version {facts.version}", "use 7.0 or newer, or Valkey"
            )
        )
    if facts.append_only is False:
        found.append(
            HealthFinding(
                "durability",
                "Redis has its append-only file off: a restart loses committed steps",
                "redis-cli CONFIG SET appendonly yes, and 'appendonly yes' in redis.conf",
            )
        )
    if facts.eviction not in (None, "noeviction"):
        found.append(
            HealthFinding(
                "eviction",
                f"Redis evicts keys when memory is short ({facts.eviction}): runs would vanish",
                "redis-cli CONFIG SET maxmemory-policy noeviction, and the same in redis.conf",
            )
        )
    if facts.full:
        found.append(
            HealthFinding(
                "memory",
                "Redis is full: it refuses commands, and all steps wait",
                "raise its maxmemory (redis-cli CONFIG SET maxmemory 8gb), or remove ended runs "
                "(stepfleet purge)",
                stops=True,
            )
        )
    if facts.writes is False:
        found.append(
            HealthFinding(
                "disk",
                "Redis cannot write to its disk: it refuses commands, and all steps wait",
                "make room on that disk, see Redis's log",
                stops=True,
            )
        )
    return found


def _is_full(info: Mapping[str, Any]) -> bool | None:
    """Return whether a server refuses writes for lack of memory."""
    used, most = info.get("used_memory"), info.get("maxmemory")
    if used is None or most is None:
        return None
    return 0 < int(most) < int(used) - int(info.get("mem_not_counted_for_evict", 0))


def _writes(info: Mapping[str, Any]) -> bool | None:
    """Return whether a server's disk takes its data, by its newest attempts."""
    states = [info.get(name) for name in ("aof_last_write_status", "rdb_last_bgsave_status")]
    known = [str(state) == "ok" for state in states if state is not None]
    return all(known) if known else None


def version_of(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version."""
    numbers = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
