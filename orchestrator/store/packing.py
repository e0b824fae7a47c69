"""Packs commands in C where hiredis is installed; redis-py's asyncio client does it in Python.

A step's scripts have some sixty arguments each: packing them is a good part of what a client
spends on Redis.
"""

from collections.abc import Iterable
from typing import Any

from redis.asyncio import ConnectionPool
from redis.connection import HiredisRespSerializer
from redis.utils import HIREDIS_AVAILABLE

_SERIALIZER = HiredisRespSerializer()


class _Packed:
    """What a connection class gets in front of it."""

    def pack_command(self, *args: Any) -> list[bytes]:
        packed: list[bytes] = _SERIALIZER.pack(*args)
        return packed

    def pack_commands(self, commands: Iterable[Iterable[Any]]) -> list[bytes]:
        return [b"".join(part for command in commands for part in self.pack_command(*command))]


def pack_faster(pool: ConnectionPool) -> None:
    """Let the pool's future connections pack by hiredis, if it is there."""
    if HIREDIS_AVAILABLE:
        plain = pool.connection_class
        pool.connection_class = type(f"Packed{plain.__name__}", (_Packed, plain), {})
