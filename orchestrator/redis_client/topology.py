"""Which node of a cluster owns which slot, and in which slot the key of a command lies."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from redis import exceptions
from redis.asyncio import Redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS as SLOTS
from redis.crc import key_slot

from stepfleet.orchestrator.redis_client.node import Command
from stepfleet.orchestrator.redis_client.urls import NodeAddress, host_port

REFRESH_SECONDS = 2.0
"""How long one node may take to answer."""
_SCRIPTS = frozenset({"EVALSHA", "EVAL"})
_KEYLESS = frozenset({"TIME", "INFO", "PING", "PUBLISH", "CLUSTER", "SCRIPT"})
_UNNAMED = ("", "?", None)
"""Hosts of a node that does not know its own address: the one at which it was reached."""


def slot_of(key: str) -> int:
    """Return the slot of a key."""
    return key_slot(key.encode())


def key_of(command: Command) -> str | None:
    """Return the (first) key of a command; None where any node can run it."""
    name = command[0]
    if name in _KEYLESS:
        return None
    key: str = command[3 if name in _SCRIPTS else 1]
    return key


def guarded(command: Command) -> Command:
    """Return a script's call with one more key of its slot, which never exists.

    While a slot moves, a node runs a command whose named keys it all has, and our scripts touch
    more keys than they name. Because no node has the added key, the node refuses the script with
    TRYAGAIN before its first write, until the slot has moved.
    """
    if command[0] not in _SCRIPTS:
        return command
    keys = int(command[2])
    last = 3 + keys
    first = command[3]
    guard = f"{first.partition('}')[0]}}}:never" if "{" in first else f"{{{first}}}:never"
    return (*command[:2], keys + 1, *command[3:last], guard, *command[last:])


@dataclass(frozen=True, slots=True)
class Topology:
    """The owners of the slots as one node reports them, None where a slot has none.

    Of two topologies the one with the higher `epoch` is newer.
    """

    owners: tuple[NodeAddress | None, ...] = (None,) * SLOTS
    replicas: frozenset[NodeAddress] = frozenset()
    epoch: int = 0
    sound: bool = True

    @classmethod
    def parse(cls, node: NodeAddress, slots: Sequence[Any], info: str) -> Self:
        """Return the topology in a node's replies to CLUSTER SLOTS and CLUSTER INFO."""
        owners: list[NodeAddress | None] = [None] * SLOTS
        replicas: set[NodeAddress] = set()
        for begin, end, master, *others in slots:
            address = _address(master, node)
            owners[int(begin) : int(end) + 1] = [address] * (int(end) - int(begin) + 1)
            replicas.update(_address(other, node) for other in others)
        facts = dict(line.split(":", 1) for line in info.split() if ":" in line)
        return cls(
            owners=tuple(owners),
            replicas=frozenset(replicas),
            epoch=int(facts.get("cluster_current_epoch", 0)),
            sound=facts.get("cluster_state") == "ok",
        )

    @property
    def masters(self) -> tuple[NodeAddress, ...]:
        """The nodes that own slots, in the order of their slots."""
        return tuple(dict.fromkeys(owner for owner in self.owners if owner is not None))


def newest(topologies: Sequence[Topology]) -> Topology:
    """Return the topology of the newest epoch, if possible from a node that is well.

    A node that is cut off from the others keeps an old one.
    """
    return max(topologies, key=lambda one: (one.epoch, one.sound))


async def fetch_topology(clients: Mapping[NodeAddress, Redis]) -> Topology:
    """Ask these nodes at the same time and return the newest topology.

    Raises `redis.exceptions.RedisError`, that of one node, where none answers.
    """
    fetches = [_fetch(node, client) for node, client in clients.items()]
    replies = await asyncio.gather(*fetches, return_exceptions=True)
    if found := [one for one in replies if isinstance(one, Topology)]:
        return newest(found)
    errors = [one for one in replies if isinstance(one, exceptions.RedisError)]
    # An error of a node that answers explains more than one of a node that cannot be reached.
    errors.sort(key=lambda one: type(one) in (exceptions.ConnectionError, exceptions.TimeoutError))
    if not errors:
        raise exceptions.ConnectionError(f"an answer cannot be read: {replies[0]!r}")
    raise errors[0]


async def _fetch(node: NodeAddress, client: Redis) -> Topology:
    pipeline = client.pipeline(transaction=False)
    pipeline.execute_command("CLUSTER", "SLOTS")
    pipeline.execute_command("CLUSTER", "INFO")
    try:
        async with asyncio.timeout(REFRESH_SECONDS):
            slots, info = await pipeline.execute(raise_on_error=False)
    except TimeoutError:
        msg = f"no answer from {host_port(node)} within {REFRESH_SECONDS} s"
        raise exceptions.TimeoutError(msg) from None
    except OSError as error:
        raise exceptions.ConnectionError(f"{host_port(node)}: {error}") from None
    for reply in (slots, info):
        if isinstance(reply, Exception):
            raise reply
    return Topology.parse(node, slots, info)


def _address(entry: Sequence[Any], node: NodeAddress) -> NodeAddress:
    host, port = entry[0], int(entry[1])
    return (node[0] if host in _UNNAMED else str(host)), port
