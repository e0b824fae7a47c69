"""Sends calls to the nodes of a Redis Cluster, each to the owner of its slot.

Follows slots that move and masters that change. Where a part of the cluster fails, the calls of its
slots wait while one call per slot probes it now and then; all other calls go on. Must not know what
is called. `docs/internals/decisions.md` says why this is not redis-py's own client.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count, cycle, islice
from typing import Any, Self

from redis import exceptions
from redis.asyncio import Redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS as SLOTS
from redis.crc import key_slot

from stepfleet.orchestrator.errors import StoreError
from stepfleet.orchestrator.redis_client.connection import FIRST_PAUSE, LONGEST_PAUSE
from stepfleet.orchestrator.redis_client.node import Call, Command, NodeConnection
from stepfleet.orchestrator.redis_client.transient_errors import (
    OutageLog,
    TransientError,
    transient_error_of,
)
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


MOST_HOPS = 5
REFRESHED_FROM = 8
"""How many nodes at most are queried at once for the topology."""
_BROKEN = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)


class Cluster:
    """The nodes of a cluster, at first those that its URL names.

    `connect` makes the client of one node. `patience` returns for how many seconds a failing call
    is repeated; it is read whenever a call waits.
    """

    def __init__(
        self,
        seeds: tuple[NodeAddress, ...],
        connect: Callable[[NodeAddress], Redis],
        patience: Callable[[], float],
    ) -> None:
        self._seeds = seeds
        self._connect = connect
        self._patience = patience
        self._nodes: dict[NodeAddress, NodeConnection] = {}
        self._topology = Topology()
        self._owners: list[NodeAddress | None] = list(self._topology.owners)
        self._any_node = cycle(self._seeds)
        self._waiting: dict[int | None, _WaitingCalls] = {}
        self._probing: asyncio.Task[None] | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._refreshes = count()
        self._departing: set[asyncio.Task[None]] = set()
        self._outages = OutageLog()
        self._closing = False

    def client_of(self, address: NodeAddress) -> Redis:
        """Return the client of one node."""
        return self._node(address).client

    def send(self, *command: Any) -> "asyncio.Future[Any]":
        """Send one command and return the future of its reply.

        It fails with `StoreError` when the node stays out of reach, with
        `redis.exceptions.ResponseError` when the node refuses the command.
        """
        return self._send(self._call(command)).reply

    async def attempt(self, *command: Any) -> Any:
        """Return the reply to one command that is not repeated; raises the errors of redis-py."""
        await self.refresh_topology()
        return await self._send(self._call(command, patient=False)).reply

    async def attempt_soon(self, *command: Any) -> Any:
        """Return the reply to one command that is not repeated, by the known topology.

        Raises `StoreError` at once where other calls of its slot wait, else for its first error.
        """
        call = self._call(command, patient=False)
        if call.slot in self._waiting:
            raise StoreError("this part of Redis is in trouble; other calls wait for it")
        return await self._send(call).explained_reply()

    async def everywhere(self, *command: Any) -> list[Any]:
        """Return the replies of all masters to a command that has no key, and is not repeated."""
        await self.refresh_topology()
        calls = []
        for master in self._topology.masters:
            calls.append(self._call(command, patient=False))
            self._node(master).send(calls[-1])
        return await asyncio.gather(*(call.reply for call in calls))

    async def master_clients(self) -> list[Redis]:
        """Return a client of each master."""
        await self.refresh_topology()
        return [self.client_of(master) for master in self._topology.masters]

    async def refresh_topology(self) -> None:
        """Ask the nodes which of them owns which slot.

        Raises `redis.exceptions.RedisError` where none answers.
        """
        await asyncio.shield(self._refresh())

    async def aclose(self) -> None:
        """Finish what is under way and disconnect; calls that wait for Redis raise `StoreError`."""
        self._closing = True
        for task in (self._probing, self._refreshing):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        for waiting in self._waiting.values():
            for call in waiting.calls:
                call.answer(waiting.error)
        self._waiting.clear()
        for node in list(self._nodes.values()):
            await node.settle()
        while self._nodes:
            await self._nodes.popitem()[1].aclose()
        if self._departing:
            await asyncio.wait(self._departing)

    # ------------------------------------------------------------------ routes

    def _call(self, command: Command, *, patient: bool = True) -> Call:
        key = key_of(command)
        return Call(guarded(command), patient, None if key is None else slot_of(key))

    def _node(self, address: NodeAddress) -> NodeConnection:
        node = self._nodes.get(address)
        if node is None:
            node = NodeConnection(self._connect(address), partial(self._receive, address))
            self._nodes[address] = node
        return node

    def _send(self, call: Call) -> Call:
        """Send a call to its node, or let it wait where its slot's node is known to fail."""
        waiting = self._waiting.get(call.slot) if self._waiting else None
        if waiting is not None and waiting.node_fails and call.patient:
            waiting.calls.append(call)
        else:
            self._route(call)
        return call

    def _route(self, call: Call) -> None:
        owner = next(self._any_node) if call.slot is None else self._owners[call.slot]
        if owner is not None:
            self._node(owner).send(call)
        else:
            error = exceptions.ClusterDownError("no node serves the slot")
            if not self._keeps(call, error):
                call.answer(error)

    def _receive(self, address: NodeAddress, calls: list[Call], values: list[Any]) -> bool:
        """Answer the calls of a node, redirect them, or keep them; return whether to reconnect."""
        for call, value in zip(calls, values, strict=True):
            if not isinstance(value, Exception):
                call.answer(value)
            elif isinstance(value, exceptions.AskError) and call.hops < MOST_HOPS:
                self._redirect(address, call, value)
                continue
            elif not self._keeps(call, value):
                call.answer(value)
            if self._waiting:
                self._readmit(call)
        if self._outages.current is not None and not self._waiting:
            self._outages.answered(time.monotonic())
        return any(isinstance(value, _BROKEN) for value in values)

    def _redirect(self, address: NodeAddress, call: Call, error: exceptions.AskError) -> None:
        """Send a call to the node that an error names: for good (MOVED), or once (ASK)."""
        call.hops += 1
        owner = (error.host or address[0], error.port)
        call.asking = not isinstance(error, exceptions.MovedError)
        if not call.asking and call.slot is not None and self._owners[call.slot] != owner:
            self._owners[call.slot] = owner
            # Other slots may have moved, too. Calls that need the topology report its errors.
            self._refresh().add_done_callback(lambda done: done.cancelled() or done.exception())
        self._node(owner).send(call)

    # ------------------------------------------------------------------ transient errors

    def _keeps(self, call: Call, error: Exception) -> bool:
        """Keep a failed call that may be repeated; return whether it was kept."""
        kind = _transient_error_of(error)
        if kind is None or not call.patient or self._closing:
            return False
        call.asking, call.hops = False, 0
        waiting = self._waiting.setdefault(call.slot, _WaitingCalls(error))
        waiting.error = error
        if call is waiting.probe:
            waiting.probe = None
            waiting.calls.appendleft(call)
        else:
            waiting.calls.append(call)
        waiting.node_fails = kind in (TransientError.AWAY, TransientError.ELSEWHERE)
        waiting.refreshes = waiting.node_fails or isinstance(error, exceptions.ClusterDownError)
        self._outages.failed(kind, error, time.monotonic())
        if self._probing is None or self._probing.done():
            self._probing = asyncio.get_running_loop().create_task(self._probe())
        return True

    def _readmit(self, call: Call) -> None:
        """If the call was the probe of its slot, and was accepted, send the others, too."""
        waiting = self._waiting.get(call.slot)
        if waiting is not None and waiting.probe is call:
            del self._waiting[call.slot]
            for one in waiting.calls:
                self._route(one)

    async def _probe(self) -> None:
        """Repeat one call of each waiting slot, again and again, until none waits."""
        pause = FIRST_PAUSE
        while self._waiting:
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE)
            if any(waiting.refreshes for waiting in self._waiting.values()):
                with suppress(exceptions.RedisError):  # the waiting calls report their own
                    await self.refresh_topology()
            now = time.monotonic()
            for slot, waiting in list(self._waiting.items()):
                waiting.drop_late(now - self._patience())
                if waiting.probe is None and waiting.calls:
                    waiting.probe = waiting.calls.popleft()
                    self._route(waiting.probe)
                elif waiting.probe is None:
                    del self._waiting[slot]

    # ------------------------------------------------------------------ topology

    def _refresh(self) -> asyncio.Task[None]:
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.get_running_loop().create_task(self._fetch_topology())
        return self._refreshing

    async def _fetch_topology(self) -> None:
        known = self._topology
        nodes = dict.fromkeys((*known.masters, *self._seeds, *known.replicas))
        size = min(len(nodes), REFRESHED_FROM)
        begin = next(self._refreshes) * size % len(nodes)
        chosen = islice(cycle(nodes), begin, begin + size)
        known = await fetch_topology({node: self.client_of(node) for node in chosen})
        self._topology, self._owners = known, list(known.owners)
        self._any_node = cycle(known.masters)
        for gone in set(self._nodes) - {*known.masters, *self._seeds, *known.replicas}:
            leaving = asyncio.get_running_loop().create_task(self._nodes.pop(gone).aclose())
            self._departing.add(leaving)
            leaving.add_done_callback(self._departing.discard)


@dataclass(slots=True, eq=False)
class _WaitingCalls:
    """Calls of one slot that wait: their newest error, and the one that probes the slot now.

    `node_fails`: the node itself fails, so that further calls need not try. `refreshes`: the
    topology may have changed.
    """

    error: Exception
    calls: deque[Call] = field(default_factory=deque)
    probe: Call | None = None
    node_fails: bool = False
    refreshes: bool = False

    def drop_late(self, latest: float) -> None:
        """Give up calls made before `latest`, and drop those whose callers have gone."""
        for call in self.calls:
            if call.made_at <= latest:
                call.answer(self.error)
        self.calls = deque(call for call in self.calls if not call.reply.done())


def _transient_error_of(error: Exception) -> TransientError | None:
    if isinstance(error, exceptions.AskError):
        return TransientError.MOVING  # redirected to and fro between two nodes
    if isinstance(error, exceptions.ClusterDownError):
        return TransientError.REFUSES
    return transient_error_of(error)
