"""Talks to Redis in C where hiredis is installed; redis-py's asyncio client does much in Python.

Its pipeline serves retries, transactions and metrics that are not asked for here:
docs/performance.md has what a round trip takes with it and without. A step's scripts have some
sixty arguments each: packing them is a good part of what a client spends on Redis. A reply that
came in together with an earlier one is taken as it is; redis-py would set a timer for it first.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from redis import exceptions
from redis._parsers.hiredis import NOT_ENOUGH_DATA
from redis.asyncio import ConnectionPool, Redis
from redis.connection import HiredisRespSerializer
from redis.utils import HIREDIS_AVAILABLE

if HIREDIS_AVAILABLE:
    import hiredis

_SERIALIZER = HiredisRespSerializer()
_PLAIN = (str, bytes, int, type(None))


class _Packed:
    """What a connection class gets in front of it."""

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
            # What was taken out of the reader is gone: it must not be waited for again.
            if isinstance(reply, hiredis.PushNotification):
                await self._parser.handle_push_response(reply)  # type: ignore[attr-defined]
            elif reply is not NOT_ENOUGH_DATA:
                if (error := _error_in(reply)) is None:
                    return reply
                if not isinstance(error, exceptions.ResponseError):  # it is about to hang up
                    await self.disconnect(nowait=True)  # type: ignore[attr-defined]
                raise error
        # No reply has arrived as a whole: redis-py waits for it.
        return await super().read_response(*args, **options)  # type: ignore[misc]


def _error_in(reply: Any) -> Exception | None:
    """Return what a reply is to raise: itself, or the loss of the connection in front of a list."""
    if isinstance(reply, Exception):
        return reply
    first = reply[0] if isinstance(reply, list) and reply else None
    return first if isinstance(first, exceptions.ConnectionError) else None


def _packed(command: tuple[Any, ...]) -> bytes:
    if command[0] == "EVALSHA":  # none of ours has arguments that need more than hiredis
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
        await connection.send_packed_command(connection.pack_commands(commands))
        return [await _reply(client, connection, str(command[0])) for command in commands]
    except BaseException:  # also a cancellation: what was asked for would answer somebody else
        await connection.disconnect(nowait=True)
        raise
    finally:
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
