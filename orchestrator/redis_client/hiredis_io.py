"""Packs commands and parses replies by hiredis, in C; redis-py alone does more in Python.

redis-py's pipeline serves retries, transactions and metrics that the store does not use:
docs/performance.md compares the time of a round trip with it and without. A step's scripts have
some sixty arguments each; packing them is a good part of a client's time for Redis. A reply that
has arrived together with an earlier one is returned at once; redis-py would set a timer first.

Silence ends a wait, not size: redis-py bounds the time of a whole request and of a whole reply, so
that a large one never passes a slow link.

This reads private parts of redis-py (`_parser`, `_reader`, `redis._parsers`): pyproject.toml bounds
its version.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from redis import exceptions
from redis._parsers.hiredis import NOT_ENOUGH_DATA, _AsyncHiredisParser
from redis.asyncio import ConnectionPool, Redis
from redis.connection import HiredisRespSerializer
from redis.utils import HIREDIS_AVAILABLE

if HIREDIS_AVAILABLE:
    import hiredis

LARGEST_TRIP = 500
LARGEST_BYTES = 1_000_000
"""A trip takes no further call when it has so many bytes: one lost reply repeats all of it."""
SLOWEST = 64 * 1024
"""Bytes per second that a link carries at least; a request may take that long to arrive."""
_SERIALIZER = HiredisRespSerializer()
_QUICK = frozenset({"EVALSHA", "HGET", "HMGET", "HGETALL"})
"""None of ours has arguments that need more than hiredis."""
_PLAIN = (str, bytes, int, type(None))


class _Travels(Protocol):
    @property
    def command(self) -> tuple[Any, ...]: ...


C = TypeVar("C", bound=_Travels)


def next_trip(pending: deque[C]) -> list[C]:
    """Take the calls that travel together next: bounded in number, and in bytes but for one."""
    calls: list[C] = []
    left = LARGEST_BYTES
    while pending and left > 0 and len(calls) < LARGEST_TRIP:
        calls.append(pending.popleft())
        left -= _size(calls[-1].command)
    return calls


def _size(command: tuple[Any, ...]) -> int:
    return sum([len(one) for one in command if one.__class__ is str or one.__class__ is bytes])


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
        """Let the next exchange take as long as a slow link has with so many bytes."""
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


async def exchange(client: Redis, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Send commands together and return their replies, a refused one's being the error.

    Raises `redis.exceptions.RedisError` or `OSError` when the connection is lost.
    """
    pool: Any = client.connection_pool
    connection = await pool.get_connection()
    try:
        packed = connection.pack_commands(commands)
        if isinstance(connection, _Packed):
            connection.allow_for(sum(map(len, packed)))
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
