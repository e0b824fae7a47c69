"""Sends calls to the nodes of a Redis Cluster, each to the one that owns its slot.

Follows slots that move and masters that change. Where a part of the cluster is in trouble the
calls of its slots wait, one of each slot asks now and then, and all others go on. Must not know
what is called.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, cycle, islice
from typing import Any

from redis import exceptions
from redis.asyncio import Redis

from stepfleet.orchestrator.errors import StoreError
from stepfleet.orchestrator.redis_client.connection import FIRST_PAUSE, LONGEST_PAUSE
from stepfleet.orchestrator.redis_client.node import Call, NodeConnection
from stepfleet.orchestrator.redis_client.slots import SLOTS, Topology, guarded, key_of, slot_of
from stepfleet.orchestrator.redis_client.topology import survey
from stepfleet.orchestrator.redis_client.transient_errors import (
    TransientError,
    Watch,
    explained,
    transient_error_of,
)
from stepfleet.orchestrator.redis_client.urls import NodeAddress

MOST_HOPS = 5
MOST_ASKED = 8
"""So many nodes are asked at once for the topology."""


class Cluster:
    """The nodes of a cluster, first of all those that its address names.

    `connect` makes the client of one node; `patience` tells for how many seconds a call is
    repeated that meets trouble, whenever one waits.
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
        self._lanes: dict[NodeAddress, NodeConnection] = {}
        self._known = Topology((None,) * SLOTS)
        self._owners: list[NodeAddress | None] = list(self._known.owners)
        self._turns = cycle(self._seeds)
        self._groups: dict[int | None, _Group] = {}
        self._looking: asyncio.Task[None] | None = None
        self._surveying: asyncio.Task[None] | None = None
        self._surveys = count()
        self._departing: set[asyncio.Task[None]] = set()
        self._watch = Watch()
        self._closing = False

    def client_of(self, place: NodeAddress) -> Redis:
        """Return the client of one node."""
        return self._lane(place).client

    def send(self, *command: Any) -> "asyncio.Future[Any]":
        """Put one command on its way and return the future of its reply.

        It fails with `StoreError` when the node stays out of reach, with
        `redis.exceptions.ResponseError` when that refuses the command.
        """
        call = self._call(command)
        self._route(call)
        return call.reply

    async def attempt(self, *command: Any) -> Any:
        """Return the reply to one command that is not repeated; raises what redis-py raises."""
        await self.survey()
        call = self._call(command, patient=False)
        self._route(call)
        return await call.reply

    async def attempt_soon(self, *command: Any) -> Any:
        """Return the reply to one command that is not repeated, by what is known of the slots.

        Raises `StoreError` at once where others of its slot wait, or what was met.
        """
        call = self._call(command, patient=False)
        if call.slot in self._groups:
            raise StoreError("this part of Redis is in trouble; other calls wait for it")
        self._route(call)
        try:
            return await call.reply
        except (exceptions.RedisError, OSError) as error:
            if isinstance(error, exceptions.NoScriptError):
                raise
            raise explained(error) from None

    async def everywhere(self, *command: Any) -> list[Any]:
        """Return the replies of all masters to a command that has no key, and is not repeated."""
        await self.survey()
        masters = self._known.masters
        calls = [self._call(command, patient=False) for _ in masters]
        for place, call in zip(masters, calls, strict=True):
            self._lane(place).send(call)
        return await asyncio.gather(*(call.reply for call in calls))

    async def master_clients(self) -> list[Redis]:
        """Return a client of each master."""
        await self.survey()
        return [self.client_of(place) for place in self._known.masters]

    async def survey(self) -> None:
        """Ask the nodes who owns which slot.

        Raises `redis.exceptions.RedisError` where none answers.
        """
        if self._surveying is None or self._surveying.done():
            self._surveying = asyncio.get_running_loop().create_task(self._survey())
        await asyncio.shield(self._surveying)

    async def aclose(self) -> None:
        """Finish what is under way and disconnect; calls that wait for Redis raise `StoreError`."""
        self._closing = True
        for task in (self._looking, self._surveying):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        for group in self._groups.values():
            group.give_up()
        self._groups.clear()
        for lane in list(self._lanes.values()):
            await lane.settle()
        while self._lanes:
            await self._lanes.popitem()[1].aclose()
        if self._departing:
            await asyncio.wait(self._departing)

    # ------------------------------------------------------------------ routes

    def _call(self, command: tuple[Any, ...], *, patient: bool = True) -> Call:
        key = key_of(command)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        slot = None if key is None else slot_of(key)
        return Call(guarded(command), slot, reply, time.monotonic(), patient)

    def _lane(self, place: NodeAddress) -> NodeConnection:
        lane = self._lanes.get(place)
        if lane is None:
            lane = self._lanes[place] = NodeConnection(place, self._connect(place), self._take_in)
        return lane

    def _route(self, call: Call) -> None:
        group = self._groups.get(call.slot) if self._groups else None
        if group is not None and group.astray and call.patient:
            group.calls.append(call)
            return
        self._send(call)

    def _send(self, call: Call) -> None:
        place = next(self._turns) if call.slot is None else self._owners[call.slot]
        if place is not None:
            self._lane(place).send(call)
        else:
            error = exceptions.ClusterDownError("no node serves the slot")
            if not self._keeps(call, error):
                call.answer(error)

    def _take_in(self, lane: NodeConnection, calls: list[Call], values: list[Any]) -> None:
        """Answer the calls, send them elsewhere, or keep them for later."""
        for call, value in zip(calls, values, strict=True):
            if not isinstance(value, Exception):
                call.answer(value)
            elif isinstance(value, exceptions.AskError) and call.hops < MOST_HOPS:
                self._follow(lane, call, value)
                continue
            elif not self._keeps(call, value):
                call.answer(value)
            if self._groups:
                self._let_in(call)
        if self._watch.trouble is not None and not self._groups:
            self._watch.answered(time.monotonic())

    def _follow(self, lane: NodeConnection, call: Call, told: exceptions.AskError) -> None:
        """Send a call where a node sends it: for good (MOVED), or while its slot moves (ASK)."""
        call.hops += 1
        place = (told.host or lane.place[0], told.port)
        call.asking = not isinstance(told, exceptions.MovedError)
        if not call.asking and call.slot is not None and self._owners[call.slot] != place:
            self._owners[call.slot] = place
            self._survey_soon()
        self._lane(place).send(call)

    # ------------------------------------------------------------------ troubles

    def _keeps(self, call: Call, error: Exception) -> bool:
        """Keep a call that failed and may be made again; return whether it was kept."""
        trouble = _trouble_of(error)
        if trouble is None or not call.patient or self._closing:
            return False
        self._wait_with(call, trouble, error)
        return True

    def _wait_with(self, call: Call, trouble: TransientError, error: Exception) -> None:
        call.asking, call.hops = False, 0
        group = self._groups.setdefault(call.slot, _Group(error))
        group.error = error
        if call is group.asking:
            group.asking = None
            group.calls.appendleft(call)
        else:
            group.calls.append(call)
        group.astray = trouble in (TransientError.AWAY, TransientError.ELSEWHERE)
        group.asks_anew = group.astray or isinstance(error, exceptions.ClusterDownError)
        self._watch.failed(trouble, error, time.monotonic())
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look())

    def _let_in(self, call: Call) -> None:
        """If the call was its slot's that asked, and was taken, the others may try, too."""
        group = self._groups.get(call.slot)
        if group is not None and group.asking is call:
            del self._groups[call.slot]
            for waiting in group.calls:
                self._send(waiting)

    async def _look(self) -> None:
        """Let one call of each waiting slot ask, again and again, until none waits."""
        pause = FIRST_PAUSE
        while self._groups:
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE)
            if any(group.asks_anew for group in self._groups.values()):
                with suppress(exceptions.RedisError):  # the calls that wait say what is wrong
                    await self.survey()
            now = time.monotonic()
            for slot, group in list(self._groups.items()):
                group.drop_late(now - self._patience())
                if group.asking is None and group.calls:
                    group.asking = group.calls.popleft()
                    self._send(group.asking)
                elif group.asking is None:
                    del self._groups[slot]

    # ------------------------------------------------------------------ topology

    async def _survey(self) -> None:
        known = self._known
        places = dict.fromkeys((*known.masters, *self._seeds, *known.replicas))
        size = min(len(places), MOST_ASKED)
        begin = next(self._surveys) * size % len(places)
        asked = islice(cycle(places), begin, begin + size)
        self._known = await survey({place: self._lane(place).client for place in asked})
        self._owners = list(self._known.owners)
        self._turns = cycle(self._known.masters)
        for place in set(self._lanes) - {*self._known.masters, *self._seeds, *self._known.replicas}:
            leaving = asyncio.get_running_loop().create_task(self._lanes.pop(place).aclose())
            self._departing.add(leaving)
            leaving.add_done_callback(self._departing.discard)

    def _survey_soon(self) -> None:
        """One slot has moved; others may have."""
        if self._surveying is None or self._surveying.done():
            self._surveying = asyncio.get_running_loop().create_task(self._survey())
            self._surveying.add_done_callback(_say_nothing)


@dataclass(slots=True, eq=False)
class _Group:
    """Calls of one slot that wait: what the last one met, and the one that asks now.

    `astray`: the node itself is in trouble, so that further calls need not try.
    """

    error: Exception
    calls: deque[Call] = field(default_factory=deque)
    asking: Call | None = None
    astray: bool = False
    asks_anew: bool = False

    def drop_late(self, latest: float) -> None:
        """Give up calls that were asked for before `latest`, and those that nobody waits for."""
        for call in self.calls:
            if call.asked <= latest:
                call.answer(self.error)
        self.calls = deque(call for call in self.calls if not call.reply.done())

    def give_up(self) -> None:
        """Answer all with what is wrong."""
        for call in self.calls:
            call.answer(self.error)


def _trouble_of(error: Exception) -> TransientError | None:
    if isinstance(error, exceptions.AskError):
        return TransientError.MOVING  # sent to and fro between two nodes
    if isinstance(error, exceptions.ClusterDownError):
        return TransientError.REFUSES
    return transient_error_of(error)


def _say_nothing(done: asyncio.Task[None]) -> None:
    if not done.cancelled():
        done.exception()  # calls that need the topology ask again, and say what is wrong
