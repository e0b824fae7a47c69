"""Asks a Redis Cluster about itself: its masters, their replicas, and where the shards lie."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeVar

from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    RedisClusterException,
    RedisError,
)
from redis.retry import Retry

from stepfleet.orchestrator.errors import ConfigurationError, StoreError
from stepfleet.orchestrator.redis_client.clients import plain_cluster_client
from stepfleet.orchestrator.redis_client.topology import Topology, slot_of
from stepfleet.orchestrator.redis_client.urls import parse_cluster
from stepfleet.orchestrator.store.keys import Keys

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """A cluster's state. `shards` counts, for each master, the store's shards that it holds."""

    sound: bool
    masters: int
    replicas: int
    alone: tuple[str, ...] = ()
    """Masters without a replica that is there."""
    unserved: int = 0
    moving: int = 0
    shards: tuple[int, ...] = ()


def asked_cluster(url: str, question: Callable[[RedisCluster], T], *, seconds: float) -> T:
    """Return the answer to a question; `seconds` is how long each node may be silent.

    Raises `ConfigurationError` for an unusable URL or refused credentials, `StoreError` when
    the cluster cannot be reached; both name the fix.
    """
    try:
        parsed = parse_cluster(url)
    except ValueError as error:
        raise ConfigurationError(f"STEPFLEET_REDIS_URL: {error}") from None
    try:
        client = plain_cluster_client(
            url,
            decode_responses=True,
            encoding_errors="replace",  # what lies in quarantine is any bytes
            socket_timeout=seconds,
            socket_connect_timeout=seconds,
            retry=Retry(NoBackoff(), 1),
        )
        with closing(client):
            return question(client)
    except (AuthenticationError, NoPermissionError) as error:
        msg = (
            f"Redis at {parsed.location} refuses the credentials: {error}; put the right ones "
            "into STEPFLEET_REDIS_URL (redis+cluster://USER:PASSWORD@HOST:7000)"
        )
        raise ConfigurationError(msg) from None
    # The client's own exception for a cluster of which no node answers is no RedisError.
    except (RedisError, RedisClusterException, OSError) as error:
        msg = (
            f"Redis at {parsed.location} cannot be reached: {error}; start it, or correct "
            "STEPFLEET_REDIS_URL"
        )
        raise StoreError(msg) from None


def infos(client: RedisCluster, *sections: str) -> list[dict[str, Any]]:
    """Return what each master says of itself."""
    return [
        {name: value for one in sections for name, value in _info(client, node, one).items()}
        for node in _primaries(client)
    ]


def cluster_facts(client: RedisCluster, shards: int) -> ClusterFacts:
    """Return the facts of a cluster whose store has so many shards."""
    primaries = _primaries(client)
    asked = primaries[0]
    topology = Topology.parse(
        (asked.host, asked.port), _ask(client, asked, "SLOTS"), _ask(client, asked, "INFO")
    )
    views = [_nodes(_ask(client, node, "NODES")) for node in primaries]
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
    """A line of CLUSTER NODES: only the node's own line tells which slots are on their way."""

    id: str
    address: str
    flags: tuple[str, ...]
    master: str
    slots: tuple[str, ...]


def _nodes(told: str) -> list[_Node]:
    lines = [line.split() for line in told.splitlines()]
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
    """Return the masters with slots, and the replicas that are there."""
    masters = [one for one in view if "master" in one.flags and one.slots]
    there = [one for one in view if not {"fail", "noaddr", "handshake"} & set(one.flags)]
    return masters, [one for one in there if "slave" in one.flags]


def _primaries(client: Any) -> list[ClusterNode]:
    found: list[ClusterNode] = client.get_primaries()
    return found


def _ask(client: Any, node: ClusterNode, what: str) -> Any:
    return client.execute_command("CLUSTER", what, target_nodes=node)


def _info(client: RedisCluster, node: ClusterNode, section: str) -> dict[str, Any]:
    found: dict[str, Any] = client.info(section, target_nodes=node)
    return found
