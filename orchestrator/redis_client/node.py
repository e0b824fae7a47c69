"""The connection to one server: calls made while a round trip is under way travel with the next.

Returns what the server answers, errors included, and judges none of it.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from redis import exceptions
from redis.asyncio import Redis

from stepfleet.orchestrator.redis_client.hiredis_io import exchange, next_trip
from stepfleet.orchestrator.redis_client.pool import RenewablePool
from stepfleet.orchestrator.redis_client.transient_errors import explained

TRIPS = 2
Command = tuple[Any, ...]


def _new_reply() -> "asyncio.Future[Any]":
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True, eq=False)
class Call:
    """One command on its way. `made_at` is monotonic; `error` is the newest one of a patient call.

    A call that is not `patient` is answered with its first error, as it is. In a cluster `slot` is
    that of its key, None where any node may answer; `asking` lets a node answer that imports the
    slot.
    """

    command: Command
    patient: bool = True
    slot: int | None = None
    reply: "asyncio.Future[Any]" = field(default_factory=_new_reply)
    made_at: float = field(default_factory=time.monotonic)
    error: Any = None
    asking: bool = False
    hops: int = 0

    def answer(self, value: Any) -> None:
        """Complete the reply with the value, or with the error that it is."""
        if self.reply.done():
            return
        if isinstance(value, BaseException):
            self.reply.set_exception(explained(value) if self.patient else value)
        else:
            self.reply.set_result(value)

    async def explained_reply(self) -> Any:
        """Return the reply of a call that is not patient; raises errors as a patient one does."""
        try:
            return await self.reply
        except (exceptions.RedisError, OSError) as error:
            raise explained(error) from None


class NodeConnection:
    """Sends calls to one server, many per round trip.

    `receive` gets the calls of a trip with their values, and returns whether to connect anew: the
    address may lead to another server by now. While `resting`, no trip begins.
    """

    def __init__(
        self, client: Redis, receive: Callable[[list[Call], list[Any]], bool], trips: int = TRIPS
    ) -> None:
        self.client = client
        self.pending: deque[Call] = deque()
        self.resting = False
        self._receive = receive
        self._trips = trips
        self._under_way: set[asyncio.Task[None]] = set()

    def send(self, call: Call) -> None:
        """Put a call on the next trip."""
        self.pending.append(call)
        if len(self._under_way) < self._trips:
            self.start_trip()

    def start_trip(self) -> None:
        """Begin a trip if calls are pending and another one is allowed."""
        if self.pending and not self.resting and len(self._under_way) < self._trips:
            trip = asyncio.get_running_loop().create_task(self._travel())
            self._under_way.add(trip)
            trip.add_done_callback(self._under_way.discard)

    async def settle(self) -> None:
        """Return when no trip is under way."""
        while self._under_way:
            await asyncio.wait(list(self._under_way))

    async def aclose(self) -> None:
        """Finish what is under way and disconnect."""
        await self.settle()
        await self.client.aclose()

    async def _travel(self) -> None:
        while self.pending and not self.resting:
            calls = next_trip(self.pending)
            try:
                if self._receive(calls, await self._round_trip(calls)):
                    self._renew()
            except BaseException as error:
                for call in calls:
                    call.answer(error)
                if not isinstance(error, Exception):
                    raise
        # Before the answered callers continue: what they send may need a trip of its own.
        self._under_way -= {asyncio.current_task()}

    async def _round_trip(self, calls: list[Call]) -> list[Any]:
        try:
            if not [call for call in calls if call.asking]:
                return await exchange(self.client, [call.command for call in calls])
            commands: list[Command] = []
            for call in calls:
                commands += [("ASKING",), call.command] if call.asking else [call.command]
            values = iter(await exchange(self.client, commands))
            return [[next(values) for _ in range(1 + call.asking)][-1] for call in calls]
        except (exceptions.RedisError, OSError) as error:
            return [error] * len(calls)
        except (AttributeError, RuntimeError, EOFError) as error:
            # redis-py raises these where its connection is closed during a call.
            lost = exceptions.ConnectionError(f"the connection was lost: {error!r}")
            return [lost] * len(calls)

    def _renew(self) -> None:
        pool = self.client.connection_pool
        if isinstance(pool, RenewablePool):
            pool.renew()
