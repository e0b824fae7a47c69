"""Reads a Redis Cluster's state: its masters, their replicas, and the places of the shards."""

from dataclasses import dataclass
from typing import Any

from redis.cluster import ClusterNode

from stepfleet.orchestrator.redis_client.cluster import Topology, slot_of
from stepfleet.orchestrator.store.keys import Keys


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


def infos(client: Any, *sections: str) -> list[dict[str, Any]]:
    """Return sections of each master's `INFO`, read one by one as of a single server."""
    found: list[dict[str, Any]] = []
    for node in client.get_primaries():
        replies = (client.info(one, target_nodes=node) for one in sections)
        found.append({name: value for reply in replies for name, value in reply.items()})
    return found


def cluster_facts(client: Any, shards: int) -> ClusterFacts:
    """Return the facts of a cluster whose store has so many shards."""
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
