"""One connection to Redis, shared by everything that runs in one event loop.

Calls made while a round trip is under way travel together in the next one, so a thousand
concurrent steps need a few connections and far fewer system calls than commands. A call
whose reply is lost is repeated until `patience` runs out: every script is safe to repeat.
"""

import asyncio
import logging
import re
import time
from collections import deque
from dataclasses import dataclass
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
REFUSALS = re.compile(r"\b(OOM|MISCONF|NOREPLICAS|BUSY|MASTERDOWN)\b|used memory > 'maxmemory'")
"""Error replies that pass when somebody helps: memory, disk or replicas are short."""
LARGEST_TRIP = 500
CLOCK_SECONDS = 60.0


class Connection:
    """Sends commands to Redis, many per round trip.

    `patience`: seconds for which a failing call is repeated before it raises `StoreError`.
    """

    def __init__(self, client: Client, *, patience: float = 20.0, trips: int = 2) -> None:
        self.client = client
        self.patience = patience
        self._pending: deque[_Call] = deque()
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
        self._pending.append(_Call(command, reply, time.monotonic() + self.patience))
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
                for call in calls:
                    if not call.reply.done():
                        call.reply.set_exception(_wrapped(error))
                if not isinstance(error, Exception):
                    raise

    async def _deliver(self, calls: "list[_Call]") -> None:
        pause = 0.02
        while calls:
            replies = await self._round_trip([call.command for call in calls])
            again = []
            for call, value in zip(calls, replies, strict=True):
                if _is_passing(value) and time.monotonic() < call.deadline:
                    again.append(call)
                elif not call.reply.done():
                    _answer(call.reply, value)
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


@dataclass(frozen=True, slots=True)
class _Call:
    """One command on its way; `deadline` is monotonic time, from when it was asked for."""

    command: tuple[Any, ...]
    reply: "asyncio.Future[Any]"
    deadline: float


def _is_passing(value: Any) -> bool:
    if isinstance(value, PASSING):
        return True
    return isinstance(value, exceptions.ResponseError) and bool(REFUSALS.search(str(value)))


def _answer(reply: "asyncio.Future[Any]", value: Any) -> None:
    if isinstance(value, Exception):
        reply.set_exception(_wrapped(value))
    else:
        reply.set_result(value)


def _wrapped(error: BaseException) -> BaseException:
    if isinstance(error, PASSING):
        return StoreError(f"Redis cannot be reached: {error}")
    if _is_passing(error):
        full = "maxmemory" in str(error)
        fix = "raise its maxmemory, or remove ended runs" if full else "see what it lacks"
        return StoreError(f"Redis refuses: {error}; {fix}")
    return error
