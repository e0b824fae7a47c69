"""The connection to one server: calls made while a round trip is under way travel with the next.

Returns what the server answers, errors included, and judges none of it.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from redis import exceptions
from redis._parsers.hiredis import NOT_ENOUGH_DATA, _AsyncHiredisParser
from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.connection import HiredisRespSerializer
from redis.utils import HIREDIS_AVAILABLE

from stepfleet.orchestrator.redis_client.transient_errors import explained


class RenewablePool(BlockingConnectionPool):
    """A blocking pool; `renew` lets every connection connect again before it is used again.

    `connects` counts how often one did, so that others see that the server may have changed.
    """

    generation = 0
    connects = 0

    def renew(self) -> None:
        """Let all connections connect again: the server behind the address may be another."""
        self.generation += 1

    async def ensure_connection(self, connection: Any) -> None:
        """Connect a connection that the pool hands out, if it is not or is of an old generation."""
        if getattr(connection, "generation", self.generation) != self.generation:
            await connection.disconnect()
        connection.generation = self.generation
        stream = getattr(connection, "_reader", None)
        await super().ensure_connection(connection)
        if getattr(connection, "_reader", None) is not stream:
            self.connects += 1


if HIREDIS_AVAILABLE:
    import hiredis

LARGEST_TRIP = 500
LARGEST_BYTES = 1_000_000
"""A trip takes no further call once it has this many bytes: one lost reply repeats all of it."""
SLOWEST = 64 * 1024
"""Bytes per second that a link carries at least; a request may take that long to arrive."""
_SERIALIZER = HiredisRespSerializer()
_QUICK = frozenset({"EVALSHA", "HGET", "HMGET", "HGETALL"})
"""None of ours has arguments that need more than hiredis."""
_PLAIN = (str, bytes, int, type(None))


class _PatientParser(_AsyncHiredisParser):
    """Waits `limit` seconds for each part of a reply; None leaves the time to the caller."""

    limit: float | None = None

    async def read_from_socket(self) -> bool:
        async with asyncio.timeout(self.limit):
            return bool(await super().read_from_socket())  # type: ignore[no-untyped-call]


class _Packed:
    """Mixed into a connection class.

    `allowed` is how long, in seconds, the server may be silent; `exchange` raises it by the size of
    a request.
    """

    socket_timeout: float | None
    _parser: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.silence = self.allowed = self.socket_timeout
        self.socket_timeout = None  # the parser and `send_packed_command` bound their waits

    def allow_for(self, size: int) -> None:
        """Let the next exchange take as long as a slow link has with that many bytes."""
        if self.silence is not None:
            self.allowed = self.silence + size / SLOWEST

    async def send_packed_command(self, *args: Any, **options: Any) -> None:
        limit = asyncio.timeout(self.allowed)
        try:
            async with limit:
                await super().send_packed_command(*args, **options)  # type: ignore[misc]
        except TimeoutError:
            if not limit.expired():
                raise
            raise exceptions.TimeoutError("Timeout writing to socket") from None

    async def _send_ping(self) -> None:
        """Take a refusal for an answer: a server that cannot write to its disk refuses PING too."""
        with suppress(exceptions.ResponseError):
            await super()._send_ping()  # type: ignore[misc]

    def pack_command(self, *args: Any) -> list[bytes]:
        packed: list[bytes] = _SERIALIZER.pack(*args)
        return packed

    def pack_commands(self, commands: Iterable[Iterable[Any]]) -> list[bytes]:
        return [b"".join([_packed(tuple(command)) for command in commands])]

    async def read_response(self, *args: Any, **options: Any) -> Any:
        reader = getattr(getattr(self, "_parser", None), "_reader", None)
        if not args and not options and reader is not None and reader.has_data():
            reply = reader.gets()
            if isinstance(reply, _PLAIN):
                return reply
            # The reader has given this reply away: it must not be waited for again.
            if isinstance(reply, hiredis.PushNotification):
                await self._parser.handle_push_response(reply)
            elif reply is not NOT_ENOUGH_DATA:
                if (error := _error_in(reply)) is None:
                    return reply
                if not isinstance(error, exceptions.ResponseError):  # it is about to hang up
                    await self.disconnect(nowait=True)  # type: ignore[attr-defined]
                raise error
        # No reply has arrived as a whole: redis-py waits for it.
        if isinstance(self._parser, _PatientParser):
            self._parser.limit = None if args or options.get("timeout") else self.allowed
        return await super().read_response(*args, **options)  # type: ignore[misc]


def _error_in(reply: Any) -> Exception | None:
    """Return the exception that a reply is, or the lost connection in front of a list."""
    if isinstance(reply, Exception):
        return reply
    first = reply[0] if isinstance(reply, list) and reply else None
    return first if isinstance(first, exceptions.ConnectionError) else None


def _packed(command: tuple[Any, ...]) -> bytes:
    if command[0] in _QUICK:
        packed: bytes = hiredis.pack_command(command)
        return packed
    return b"".join(_SERIALIZER.pack(*command))


async def exchange(
    client: Redis, commands: Sequence[tuple[Any, ...]], packed: bytes = b""
) -> list[Any]:
    """Send commands together and return their replies, a refused one's being the error.

    `packed` is their wire form, where that is known. Raises `redis.exceptions.RedisError` or
    `OSError` when the connection is lost.
    """
    pool: Any = client.connection_pool
    connection = await pool.get_connection()
    try:
        packed = packed or b"".join(map(_packed, commands))
        if isinstance(connection, _Packed):
            connection.allow_for(len(packed))
        await connection.send_packed_command(packed)
        return [await _reply(client, connection, str(command[0])) for command in commands]
    except BaseException:  # also a cancellation: its reply would answer another call
        await connection.disconnect(nowait=True)
        raise
    finally:
        if isinstance(connection, _Packed):
            connection.allow_for(0)
        await pool.release(connection)


async def _reply(client: Any, connection: Any, command: str) -> Any:
    try:
        reply = await connection.read_response()
    except exceptions.ResponseError as refusal:
        return refusal
    if command == "EVALSHA" or command not in client.response_callbacks:
        return reply
    return client.response_callbacks[command](reply)


def pack_faster(pool: ConnectionPool) -> None:
    """Let the pool's future connections pack and read by hiredis, if it is there."""
    if HIREDIS_AVAILABLE:
        plain = pool.connection_class
        pool.connection_class = type(f"Packed{plain.__name__}", (_Packed, plain), {})
        pool.connection_kwargs.setdefault("parser_class", _PatientParser)


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
    packed: bytes = b""
    """The command as it is sent, from its first trip on."""

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


def next_trip(pending: deque[Call]) -> list[Call]:
    """Take the calls that travel together next: bounded in number, and in bytes but for one."""
    calls: list[Call] = []
    left = LARGEST_BYTES
    while pending and left > 0 and len(calls) < LARGEST_TRIP:
        call = pending.popleft()
        try:
            call.packed = call.packed or _packed(call.command)
        except Exception as error:  # noqa: BLE001 - its caller learns of it, the others travel
            call.answer(error)
            continue
        left -= len(call.packed)
        calls.append(call)
    return calls


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
                packed = b"".join([call.packed for call in calls])
                return await exchange(self.client, [call.command for call in calls], packed)
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
