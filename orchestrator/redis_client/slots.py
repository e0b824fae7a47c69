"""Where a cluster keeps what: slots of keys and commands, and which node owns a slot. Pure."""

import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

from stepfleet.orchestrator.redis_client.urls import NodeAddress

SLOTS = 16_384
Command = tuple[Any, ...]

_SCRIPTS = frozenset({"EVALSHA", "EVAL"})
_KEYLESS = frozenset({"TIME", "INFO", "PING", "PUBLISH", "CLUSTER", "SCRIPT"})
_UNNAMED = ("", "?", None)
"""How a node names one whose address it does not know: that is where it was asked itself."""


def slot_of(key: str) -> int:
    """Return a key's slot: of the text in its first braces, if there is any, else of all of it."""
    begin = key.find("{")
    if begin >= 0:
        end = key.find("}", begin)
        if end > begin + 1:
            return _slot(key[begin + 1 : end])
    return _slot(key)


@lru_cache(maxsize=8192)
def _slot(tag: str) -> int:
    return binascii.crc_hqx(tag.encode(), 0) % SLOTS


def key_of(command: Command) -> str | None:
    """Return the (first) key that a command is about; None for one that any node answers."""
    name = command[0]
    if name in _SCRIPTS:
        key: str = command[3]
        return key
    if name in _KEYLESS:
        return None
    if name == "XREAD":
        first: str = command[command.index("STREAMS") + 1]
        return first
    plain: str = command[1]
    return plain


def guarded(command: Command) -> Command:
    """Return a script's call with one more key of its slot, which never exists.

    While a slot moves, a node runs what names keys of which it has all, and a script of ours
    touches more than it names. With a key that no node has it is told to try again until the
    slot has moved, before its first write.
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
    """Who owns which slot, as one node told; `epoch` tells the newer of two apart.

    `owners` has an entry per slot, None where nobody serves it.
    """

    owners: tuple[NodeAddress | None, ...]
    replicas: frozenset[NodeAddress] = frozenset()
    epoch: int = 0
    sound: bool = True

    @classmethod
    def told(cls, asked: NodeAddress, slots: Sequence[Any], info: str) -> Self:
        """Return what the node at `asked` answered to CLUSTER SLOTS and CLUSTER INFO."""
        owners: list[NodeAddress | None] = [None] * SLOTS
        replicas: set[NodeAddress] = set()
        for begin, end, master, *others in slots:
            place = _named(master, asked)
            owners[int(begin) : int(end) + 1] = [place] * (int(end) - int(begin) + 1)
            replicas.update(_named(other, asked) for other in others)
        facts = dict(line.split(":", 1) for line in info.split() if ":" in line)
        return cls(
            owners=tuple(owners),
            replicas=frozenset(replicas),
            epoch=int(facts.get("cluster_current_epoch", 0)),
            sound=facts.get("cluster_state") == "ok",
        )

    @property
    def masters(self) -> tuple[NodeAddress, ...]:
        """The nodes that own slots, in their order."""
        return tuple(dict.fromkeys(place for place in self.owners if place is not None))


def newest(told: Sequence[Topology]) -> Topology:
    """Return the topology to believe: of the newest epoch, and of a node that is well.

    A node that is cut off from the others keeps an old one.
    """
    return max(told, key=lambda one: (one.epoch, one.sound))


def _named(node: Sequence[Any], asked: NodeAddress) -> NodeAddress:
    host, port = node[0], int(node[1])
    return (asked[0] if host in _UNNAMED else str(host)), port
