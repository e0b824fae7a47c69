"""The way to one node of a cluster: calls made while a trip is under way travel with the next.

Brings back what the node said, errors included, and judges none of it.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from redis import exceptions
from redis.asyncio import Redis

from stepfleet.orchestrator.redis_client.hiredis_io import exchange, next_trip
from stepfleet.orchestrator.redis_client.pool import RenewablePool
from stepfleet.orchestrator.redis_client.slots import Command
from stepfleet.orchestrator.redis_client.transient_errors import explained
from stepfleet.orchestrator.redis_client.urls import NodeAddress

TRIPS = 2
_BROKEN = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)


@dataclass(slots=True, eq=False)
class Call:
    """One command on its way, asked for at a monotonic time.

    `slot` is None where any node may answer. `asking` goes with it to a node that is about to
    get the slot. A call that is not `patient` is answered with the first error, as it is.
    """

    command: Command
    slot: int | None
    reply: "asyncio.Future[Any]"
    asked: float
    patient: bool = True
    asking: bool = False
    hops: int = 0

    def answer(self, value: Any) -> None:
        """Let the caller go on: with the value, or with the error that it is."""
        if self.reply.done():
            return
        if isinstance(value, BaseException):
            self.reply.set_exception(explained(value) if self.patient else value)
        else:
            self.reply.set_result(value)


class NodeConnection:
    """Sends calls to one node; `take_in` gets them back with their values, errors among them."""

    def __init__(
        self,
        place: NodeAddress,
        client: Redis,
        take_in: "Callable[[NodeConnection, list[Call], list[Any]], None]",
    ) -> None:
        self.place = place
        self.client = client
        self._take_in = take_in
        self._pending: deque[Call] = deque()
        self._under_way: set[asyncio.Task[None]] = set()

    def send(self, call: Call) -> None:
        """Put a call on the next trip."""
        self._pending.append(call)
        if len(self._under_way) < TRIPS:
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
        while self._pending:
            calls = next_trip(self._pending)
            try:
                values = await self._round_trip(calls)
                if any(isinstance(value, _BROKEN) for value in values):
                    self._renew()
                self._take_in(self, calls, values)
            except BaseException as error:
                for call in calls:
                    call.answer(error)
                if not isinstance(error, Exception):
                    raise
        # Before those who were answered go on: what they send may need a trip of its own.
        self._under_way -= {asyncio.current_task()}

    def _renew(self) -> None:
        """Whoever listens there next may be another server: connect anew."""
        pool = self.client.connection_pool
        if isinstance(pool, RenewablePool):
            pool.renew()

    async def _round_trip(self, calls: list[Call]) -> list[Any]:
        try:
            commands: list[tuple[Any, ...]] = []
            for call in calls:
                commands += [("ASKING",), call.command] if call.asking else [call.command]
            values = iter(await exchange(self.client, commands))
            return [_behind_asking(values) if call.asking else next(values) for call in calls]
        except (exceptions.RedisError, OSError) as error:
            return [error] * len(calls)


def _behind_asking(values: Any) -> Any:
    next(values)
    return next(values)
