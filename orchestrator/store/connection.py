"""One connection to Redis, shared by everything that runs in one event loop.

Calls made while a round trip is under way travel together in the next one, so a thousand
concurrent steps need a few connections and far fewer system calls than commands. A call
whose reply is lost is repeated until `patience` runs out: every script is safe to repeat.
"""

import asyncio
import logging
import time
from collections import deque
from datetime import UTC, datetime, timedelta
from typing import Any

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster

from stepfleet.orchestrator.errors import StoreError

log = logging.getLogger(__name__)

Client = Redis | RedisCluster
PASSING = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.BusyLoadingError,
    exceptions.ReadOnlyError,
    exceptions.TryAgainError,
    exceptions.ClusterDownError,
    OSError,
)
LARGEST_TRIP = 500
CLOCK_SECONDS = 60.0


class Connection:
    """Sends commands to Redis, many per round trip.

    `patience`: seconds for which a failing call is repeated before it raises `StoreError`.
    """

    def __init__(self, client: Client, *, patience: float = 20.0, trips: int = 2) -> None:
        self.client = client
        self.patience = patience
        self._pending: deque[tuple[tuple[Any, ...], asyncio.Future[Any]]] = deque()
        self._trips = trips
        self._under_way: set[asyncio.Task[None]] = set()
        self._trouble = False
        self._asked_at: float | None = None
        self._told = datetime.min.replace(tzinfo=UTC)

    async def execute(self, *command: Any) -> Any:
        """Return the reply to one command.

        Raises `StoreError` when Redis stays out of reach, `redis.exceptions.ResponseError`
        when it refuses the command.
        """
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending.append((command, reply))
        if len(self._under_way) < self._trips:
            trip = asyncio.get_running_loop().create_task(self._travel())
            self._under_way.add(trip)
            trip.add_done_callback(self._under_way.discard)
        return await reply

    async def execute_all(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Return the replies to several commands, which travel together."""
        return await asyncio.gather(*(self.execute(*command) for command in commands))

    async def now(self) -> datetime:
        """Return Redis's time, the one clock of stamps: asked for once in a while, then carried on.

        Raises `StoreError` when Redis stays out of reach.
        """
        if self._asked_at is None or time.monotonic() - self._asked_at > CLOCK_SECONDS:
            seconds, micros = await self.execute("TIME")
            self._asked_at = time.monotonic()
            self._told = datetime.fromtimestamp(int(seconds), UTC) + timedelta(
                microseconds=int(micros)
            )
        return self._told + timedelta(seconds=time.monotonic() - self._asked_at)

    async def aclose(self) -> None:
        """Finish what is under way and disconnect."""
        if self._under_way:
            await asyncio.wait(list(self._under_way))
        await self.client.aclose()

    async def _travel(self) -> None:
        while self._pending:
            size = min(len(self._pending), LARGEST_TRIP)
            calls = [self._pending.popleft() for _ in range(size)]
            try:
                await self._deliver(calls)
            except BaseException as error:
                for _, reply in calls:
                    if not reply.done():
                        reply.set_exception(_wrapped(error))
                if not isinstance(error, Exception):
                    raise

    async def _deliver(self, calls: list[tuple[tuple[Any, ...], asyncio.Future[Any]]]) -> None:
        deadline = time.monotonic() + self.patience
        pause = 0.02
        while calls:
            replies = await self._round_trip([command for command, _ in calls])
            again = []
            for call, value in zip(calls, replies, strict=True):
                if isinstance(value, PASSING) and time.monotonic() < deadline:
                    again.append(call)
                elif not call[1].done():
                    _answer(call[1], value)
            if again:
                self._say(trouble=True)
                await asyncio.sleep(pause)
                pause = min(pause * 2, 1.0)
            else:
                self._say(trouble=False)
            calls = again

    async def _round_trip(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        try:
            if len(commands) == 1:
                return [await self.client.execute_command(*commands[0])]
            pipeline = self.client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            return await pipeline.execute(raise_on_error=False)
        except (*PASSING, exceptions.RedisError) as error:
            return [error] * len(commands)

    def _say(self, *, trouble: bool) -> None:
        if trouble and not self._trouble:
            log.warning("Redis does not answer; waiting for it")
        if self._trouble and not trouble:
            log.warning("Redis answers again")
        self._trouble = trouble


def _answer(reply: "asyncio.Future[Any]", value: Any) -> None:
    if isinstance(value, Exception):
        reply.set_exception(_wrapped(value))
    else:
        reply.set_result(value)


def _wrapped(error: BaseException) -> BaseException:
    if isinstance(error, PASSING):
        return StoreError(f"Redis cannot be reached: {error}")
    return error
