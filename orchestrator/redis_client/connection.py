"""One connection to Redis, shared by everything that runs in one event loop.

Calls made while a round trip is under way travel together in the next one, so a thousand
concurrent steps need a few connections and far fewer system calls than commands. A call
whose reply is lost is repeated until `patience` runs out: every script is safe to repeat.

While Redis is away, all calls rest, and one trip now and then looks for it. While it refuses
some, those wait outside and one of them asks now and then, so that the others (which may be what
helps) pass.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from redis import exceptions
from redis.asyncio import Redis

from stepfleet.orchestrator.errors import StoreError
from stepfleet.orchestrator.redis_client.hiredis_io import exchange, next_trip
from stepfleet.orchestrator.redis_client.pool import RenewablePool
from stepfleet.orchestrator.redis_client.transient_errors import (
    TransientError,
    Watch,
    explained,
    transient_error_of,
)

CLOCK_SECONDS = 60.0
FIRST_PAUSE = 0.02
LONGEST_PAUSE = 1.0
_ANEW = (TransientError.AWAY, TransientError.ELSEWHERE)
CALM_SECONDS = 10.0
"""Pauses begin small again after so long without a failure."""


class Connection:
    """Sends commands to Redis, many per round trip.

    `patience`: seconds for which a failing call is repeated before it raises `StoreError`. It may
    be changed at any time, also for the calls that wait; a worker's is endless until it stops.
    """

    def __init__(self, client: Redis, *, patience: float = 20.0, trips: int = 2) -> None:
        self.client = client
        self.patience = patience
        self.takes_flags = True
        """Whether its servers know flags of scripts; found out by the first call with some."""
        self._pending: deque[_Call] = deque()
        self._trips = trips
        self._under_way: set[asyncio.Task[None]] = set()
        self._rest: asyncio.TimerHandle | None = None
        self._refused: deque[_Call] = deque()
        self._asking: _Call | None = None
        self._ask_all = False
        self._next_ask: asyncio.TimerHandle | None = None
        self._pause = FIRST_PAUSE
        self._failed_at = 0.0
        self._watch = Watch()
        self._closing = False
        self._asked_at: float | None = None
        self._told = datetime.min.replace(tzinfo=UTC)

    @property
    def connects(self) -> int:
        """How often a connection was made: a number that is new may mean a server that is."""
        pool = self.client.connection_pool
        return pool.connects if isinstance(pool, RenewablePool) else 0

    async def execute(self, *command: Any) -> Any:
        """Return the reply to one command.

        Raises `StoreError` when Redis stays out of reach, `redis.exceptions.ResponseError`
        when it refuses the command.
        """
        return await self.send(*command)

    def send(self, *command: Any) -> "asyncio.Future[Any]":
        """Put one command on its way and return the future of its reply; fails as `execute`."""
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending.append(_Call(command, reply, time.monotonic()))
        self._go()
        return reply

    async def attempt(self, *command: Any) -> Any:
        """Return the reply to a command that is of use now or never: it waits for no trouble's end.

        Raises `StoreError` at once while other calls wait, else as `execute`.
        """
        if self._rest is not None or self._refused:
            raise StoreError("Redis is in trouble; other calls wait for it")
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending.append(_Call(command, reply, time.monotonic(), patient=False))
        self._go()
        return await reply

    async def execute_all(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Return the replies to several commands, which travel together."""
        return await asyncio.gather(*(self.send(*command) for command in commands))

    async def everywhere(self, *command: Any) -> list[Any]:
        """Return the reply of every server; only a cluster has more than one."""
        return [await self.execute(*command)]

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
        """Finish what is under way and disconnect; calls that wait for Redis raise `StoreError`."""
        self._closing = True
        for timer in (self._rest, self._next_ask):
            if timer is not None:
                timer.cancel()
        self._rest = self._next_ask = None
        self._give_up(self._refused)
        self._go()
        while self._under_way:
            await asyncio.wait(list(self._under_way))
        await self.client.aclose()

    # ------------------------------------------------------------------ trips

    def _go(self) -> None:
        if self._pending and self._rest is None and len(self._under_way) < self._trips:
            trip = asyncio.get_running_loop().create_task(self._travel())
            self._under_way.add(trip)
            trip.add_done_callback(self._under_way.discard)

    async def _travel(self) -> None:
        while self._pending and self._rest is None:
            calls = next_trip(self._pending)
            try:
                values = await self._round_trip([call.command for call in calls])
                if self._take_in(calls, values):
                    _renew(self.client.connection_pool)
            except BaseException as error:
                for call in calls:
                    call.answer(error)
                if not isinstance(error, Exception):
                    raise
        # Before those who were answered go on: what they send may need a trip of its own.
        self._under_way -= {asyncio.current_task()}

    async def _round_trip(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        try:
            return await exchange(self.client, commands)
        except (exceptions.RedisError, OSError) as error:
            return [error] * len(commands)
        except (AttributeError, RuntimeError, EOFError) as error:
            # What redis-py stumbles over when its connection is taken away under it.
            lost = exceptions.ConnectionError(f"the connection was lost: {error!r}")
            return [lost] * len(commands)

    def _take_in(self, calls: "list[_Call]", values: list[Any]) -> bool:
        """Answer the calls or keep them for later; return whether to connect anew."""
        failed: list[tuple[_Call, TransientError]] = []
        troubles: list[TransientError] = []
        for call, value in zip(calls, values, strict=True):
            trouble = transient_error_of(value)
            if trouble is None:
                call.answer(value)
                if call is self._asking:
                    self._let_in()
                continue
            troubles.append(trouble)
            if call.patient:
                call.error = value
                failed.append((call, trouble))
            else:
                call.answer(value)
                self._watch.failed(trouble, value, time.monotonic())
        if failed:
            self._wait_with(failed, answered=len(troubles) < len(calls))
        elif not troubles and self._watch.trouble is not None and not self._refused:
            self._watch.answered(time.monotonic())
        return any(trouble in _ANEW for trouble in troubles)

    # ------------------------------------------------------------------ troubles

    def _wait_with(self, failed: "list[tuple[_Call, TransientError]]", *, answered: bool) -> None:
        now = time.monotonic()
        if now - self._failed_at > CALM_SECONDS:
            self._pause = FIRST_PAUSE
        self._failed_at = now
        first, trouble = failed[0]
        self._watch.failed(trouble, first.error, now)
        if self._closing:
            self._give_up(call for call, _ in failed)
            self._give_up(self._pending)
        elif trouble is TransientError.AWAY and not answered:
            self._pending.extendleft(call for call, _ in reversed(failed))
            self._asking = None
            self._rest_a_while(first.error, now)
        else:
            self._refused.extend(call for call, _ in failed)
            self._ask_all |= trouble in (TransientError.AWAY, TransientError.MOVING)
            if any(call is self._asking for call, _ in failed):
                self._asking = None
            self._ask_later()

    def _rest_a_while(self, error: Exception, now: float) -> None:
        for calls in (self._pending, self._refused):
            for call in calls:
                call.error = call.error or error
            self._drop_late(calls, now)
        if self._rest is None:
            self._rest = self._after_a_pause(self._resume)

    def _resume(self) -> None:
        self._rest = None
        self._go()
        self._ask_later()

    def _ask_later(self) -> None:
        if self._refused and self._asking is None and self._next_ask is None:
            self._next_ask = self._after_a_pause(self._ask)

    def _ask(self) -> None:
        """Make one of the refused calls again; the others wait for what becomes of it.

        Where only a part of a cluster is in trouble, one call tells nothing of the others.
        """
        self._next_ask = None
        self._drop_late(self._refused, time.monotonic())
        if self._ask_all:
            self._ask_all = False
            self._let_in()
            self._go()
        elif self._refused and self._asking is None:
            self._asking = self._refused.popleft()
            self._pending.append(self._asking)
            self._go()

    def _let_in(self) -> None:
        """The call that asked was taken: let the others try, too."""
        self._asking = None
        self._pending.extend(self._refused)
        self._refused.clear()

    def _after_a_pause(self, what: Callable[[], None]) -> asyncio.TimerHandle:
        pause, self._pause = self._pause, min(self._pause * 2, LONGEST_PAUSE)
        return asyncio.get_running_loop().call_later(pause, what)

    def _drop_late(self, calls: "deque[_Call]", now: float) -> None:
        """Give up calls whose patience is at an end, and those that nobody waits for."""
        kept = []
        for call in calls:
            if now >= call.asked + self.patience and call.error is not None:
                call.answer(call.error)
            if not call.reply.done():
                kept.append(call)
        calls.clear()
        calls.extend(kept)

    @staticmethod
    def _give_up(calls: "Iterable[_Call]") -> None:
        for call in list(calls):
            call.answer(call.error or StoreError("the connection to Redis is being closed"))


def _renew(pool: Any) -> None:
    if isinstance(pool, RenewablePool):
        pool.renew()


@dataclass(slots=True, eq=False)
class _Call:
    """One command on its way, asked for at a monotonic time; `error` is what it met last.

    One that is not `patient` is answered with the first error.
    """

    command: tuple[Any, ...]
    reply: "asyncio.Future[Any]"
    asked: float
    error: Any = None
    patient: bool = True

    def answer(self, value: Any) -> None:
        """Let the caller go on: with the value, or with the error that it is."""
        if self.reply.done():
            return
        if isinstance(value, BaseException):
            self.reply.set_exception(explained(value))
        else:
            self.reply.set_result(value)
