"""One connection to Redis, shared by everything that runs in one event loop.

A thousand concurrent steps need a few connections and far fewer system calls than commands (see
`node`). A call whose reply is lost is repeated until `patience` runs out: every script is safe to
repeat.

While Redis does not answer, all calls wait and one trip now and then probes it. While Redis refuses
some calls, those wait and one of them probes, so that the others (among them the one that may help)
pass.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from redis.asyncio import Redis

from stepfleet.orchestrator.errors import StoreError
from stepfleet.orchestrator.redis_client.node import TRIPS, Call, NodeConnection, RenewablePool
from stepfleet.orchestrator.redis_client.transient_errors import (
    OutageLog,
    TransientError,
    transient_error_of,
)

CLOCK_SECONDS = 60.0
FIRST_PAUSE = 0.02
LONGEST_PAUSE = 1.0
_RECONNECT = (TransientError.AWAY, TransientError.ELSEWHERE)
CALM_SECONDS = 10.0
"""After this time without a failure, pauses are short again."""


class Connection:
    """Sends commands to Redis, many per round trip.

    `patience`: seconds for which a failing call is repeated before it raises `StoreError`. A change
    applies to waiting calls too; that of a worker is endless until it stops.
    """

    def __init__(self, client: Redis, *, patience: float = 20.0, trips: int = TRIPS) -> None:
        self.client = client
        self.patience = patience
        self.takes_flags = True
        """Whether its servers accept flags of scripts; the first call with some finds out."""
        self._node = NodeConnection(client, self._receive, trips)
        self._rest: asyncio.TimerHandle | None = None
        self._refused: deque[Call] = deque()
        self._probe: Call | None = None
        self._probe_all = False
        self._next_probe: asyncio.TimerHandle | None = None
        self._pause = FIRST_PAUSE
        self._failed_at = 0.0
        self._outages = OutageLog()
        self._closing = False
        self._clock_read_at: float | None = None
        self._clock = datetime.min.replace(tzinfo=UTC)

    @property
    def connects(self) -> int:
        """How often a connection was made: a new number may mean another server."""
        pool = self.client.connection_pool
        return pool.connects if isinstance(pool, RenewablePool) else 0

    async def execute(self, *command: Any) -> Any:
        """Return the reply to one command.

        Raises `StoreError` when Redis stays out of reach, `redis.exceptions.ResponseError`
        when it refuses the command.
        """
        return await self.send(*command)

    def send(self, *command: Any) -> "asyncio.Future[Any]":
        """Send one command and return the future of its reply, which fails as `execute` does."""
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        # Not by the factories of `Call`, which are slower.
        self._node.send(Call(command, reply=reply, made_at=time.monotonic()))
        return reply

    async def attempt(self, *command: Any) -> Any:
        """Return the reply to a command that is useful now or never, and is not repeated.

        Raises `StoreError` at once while other calls wait, else as `execute` does.
        """
        if self._rest is not None or self._refused:
            raise StoreError("Redis is in trouble; other calls wait for it")
        call = Call(command, patient=False)
        self._node.send(call)
        return await call.explained_reply()

    async def execute_all(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Return the replies to several commands, which travel together."""
        return await asyncio.gather(*(self.send(*command) for command in commands))

    async def timed(self, *commands: tuple[Any, ...]) -> tuple[list[Any], float]:
        """Return the replies, or errors, of commands that travel together, and Redis's seconds.

        Those of the way there and back are not among them. Raises `StoreError` when Redis stays
        out of reach.
        """
        clock = ("TIME",)
        sent = [self.send(*command) for command in (clock, *commands, clock)]
        found: list[Any] = await asyncio.gather(*sent, return_exceptions=True)
        began, *replies, ended = found
        for one in (began, ended):
            if isinstance(one, BaseException):
                raise one
        seconds = int(ended[0]) - int(began[0]) + (int(ended[1]) - int(began[1])) / 1e6
        return replies, max(seconds, 0.0)

    async def everywhere(self, *command: Any) -> list[Any]:
        """Return the reply of every server; only a cluster has more than one."""
        return [await self.execute(*command)]

    async def servers(self) -> list[Redis]:
        """Return a client of every server that holds data; only a cluster has more than one."""
        return [self.client]

    async def now(self) -> datetime:
        """Return the time of Redis, the one clock of stamps: read once a minute and carried on.

        Raises `StoreError` when Redis stays out of reach.
        """
        read_at = self._clock_read_at
        if read_at is None or time.monotonic() - read_at > CLOCK_SECONDS:
            self._clock = await self.read_clock()
            self._clock_read_at = read_at = time.monotonic()
        return self._clock + timedelta(seconds=time.monotonic() - read_at)

    async def read_clock(self) -> datetime:
        """Return the time of Redis, read now. Raises `StoreError` as `execute` does."""
        seconds, micros = await self.execute("TIME")
        return datetime.fromtimestamp(int(seconds), UTC) + timedelta(microseconds=int(micros))

    async def aclose(self) -> None:
        """Finish what is under way and disconnect; calls that wait for Redis raise `StoreError`."""
        self._closing = True
        for timer in (self._rest, self._next_probe):
            if timer is not None:
                timer.cancel()
        self._next_probe = None
        self._give_up(self._refused)
        self._refused.clear()
        self._end_rest()
        await self._node.aclose()

    # ------------------------------------------------------------------ replies

    def _receive(self, calls: list[Call], values: list[Any]) -> bool:
        """Answer the calls or keep them for later; return whether to connect anew."""
        failed: list[tuple[Call, TransientError]] = []
        errors: list[TransientError] = []
        for call, value in zip(calls, values, strict=True):
            kind = transient_error_of(value)
            if kind is None:
                call.answer(value)
                if call is self._probe:
                    self._readmit()
                continue
            errors.append(kind)
            if call.patient:
                call.error = value
                failed.append((call, kind))
            else:
                call.answer(value)
                self._outages.failed(kind, value, time.monotonic())
        if failed:
            self._wait_with(failed, answered=len(errors) < len(calls))
        elif not errors and self._outages.current is not None and not self._refused:
            self._outages.answered(time.monotonic())
        return any(kind in _RECONNECT for kind in errors)

    # ------------------------------------------------------------------ transient errors

    def _wait_with(self, failed: list[tuple[Call, TransientError]], *, answered: bool) -> None:
        now = time.monotonic()
        if now - self._failed_at > CALM_SECONDS:
            self._pause = FIRST_PAUSE
        self._failed_at = now
        first, kind = failed[0]
        self._outages.failed(kind, first.error, now)
        if self._closing:
            self._give_up(call for call, _ in failed)
            self._give_up(self._node.pending)
        elif kind is TransientError.AWAY and not answered:
            self._node.pending.extendleft(call for call, _ in reversed(failed))
            self._probe = None
            self._begin_rest(first.error, now)
        else:
            self._refused.extend(call for call, _ in failed)
            self._probe_all |= kind in (TransientError.AWAY, TransientError.MOVING)
            if any(call is self._probe for call, _ in failed):
                self._probe = None
            self._probe_later()

    def _begin_rest(self, error: Exception, now: float) -> None:
        for calls in (self._node.pending, self._refused):
            for call in calls:
                call.error = call.error or error
            self._drop_late(calls, now)
        if self._rest is None:
            self._node.resting = True
            self._rest = self._after_a_pause(self._end_rest)

    def _end_rest(self) -> None:
        self._rest = None
        self._node.resting = False
        self._node.start_trip()
        self._probe_later()

    def _probe_later(self) -> None:
        if self._refused and self._probe is None and self._next_probe is None:
            self._next_probe = self._after_a_pause(self._probe_now)

    def _probe_now(self) -> None:
        """Repeat one of the refused calls; the others wait for its outcome.

        Where only a part of a cluster fails, one call says nothing of the others: all are repeated.
        """
        self._next_probe = None
        self._drop_late(self._refused, time.monotonic())
        if self._probe_all:
            self._probe_all = False
            self._readmit()
            self._node.start_trip()
        elif self._refused and self._probe is None:
            self._probe = self._refused.popleft()
            self._node.send(self._probe)

    def _readmit(self) -> None:
        """Let all refused calls try again: the probe was accepted."""
        self._probe = None
        self._node.pending.extend(self._refused)
        self._refused.clear()

    def _after_a_pause(self, what: Callable[[], None]) -> asyncio.TimerHandle:
        pause, self._pause = self._pause, min(self._pause * 2, LONGEST_PAUSE)
        return asyncio.get_running_loop().call_later(pause, what)

    def _drop_late(self, calls: deque[Call], now: float) -> None:
        """Give up calls whose patience has ended, and drop those whose callers have gone."""
        kept = []
        for call in calls:
            if now >= call.made_at + self.patience and call.error is not None:
                call.answer(call.error)
            if not call.reply.done():
                kept.append(call)
        calls.clear()
        calls.extend(kept)

    @staticmethod
    def _give_up(calls: Iterable[Call]) -> None:
        for call in list(calls):
            call.answer(call.error or StoreError("the connection to Redis is being closed"))
