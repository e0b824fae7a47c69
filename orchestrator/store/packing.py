"""Packs commands in C where hiredis is installed; redis-py's asyncio client does it in Python.

A step's scripts have some sixty arguments each: packing them is a good part of what a client
spends on Redis.
"""

from collections.abc import Iterable
from typing import Any

from redis.asyncio import ConnectionPool
from redis.connection import HiredisRespSerializer
from redis.utils import HIREDIS_AVAILABLE

if HIREDIS_AVAILABLE:
    import hiredis

_SERIALIZER = HiredisRespSerializer()


class _Packed:
    """What a connection class gets in front of it."""

    def pack_command(self, *args: Any) -> list[bytes]:
        packed: list[bytes] = _SERIALIZER.pack(*args)
        return packed

    def pack_commands(self, commands: Iterable[Iterable[Any]]) -> list[bytes]:
        return [b"".join([_packed(tuple(command)) for command in commands])]


def _packed(command: tuple[Any, ...]) -> bytes:
    if command[0] == "EVALSHA":  # none of ours has arguments that need more than hiredis
        packed: bytes = hiredis.pack_command(command)
        return packed
    return b"".join(_SERIALIZER.pack(*command))


def pack_faster(pool: ConnectionPool) -> None:
    """Let the pool's future connections pack by hiredis, if it is there."""
    if HIREDIS_AVAILABLE:
        plain = pool.connection_class
        pool.connection_class = type(f"Packed{plain.__name__}", (_Packed, plain), {})
