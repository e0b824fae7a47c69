"""Whether a Redis server keeps runs safe. Judging is pure; asking is one function."""

from collections.abc import Mapping
from typing import Any

from redis.exceptions import RedisError

from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.store.connection import Connection

OLDEST = (7, 0)


async def server_info(connection: Connection) -> dict[str, Any]:
    """Return what the server says of itself; empty where it may not be asked."""
    try:
        parts = await connection.execute_all(
            ("INFO", "server"), ("INFO", "persistence"), ("INFO", "memory")
        )
    except (RedisError, AgentException):
        return {}
    return {name: value for part in parts for name, value in part.items()}


def warnings(info: Mapping[str, Any]) -> list[str]:
    """Return what about the server endangers runs, each with its fix; nothing for a sound one."""
    said = []
    version = str(info.get("redis_version", ""))
    if version and _numbers(version) < OLDEST:
        said.append(f"Redis is version {version}: use 7.0 or newer, or Valkey")
    if str(info.get("aof_enabled", "1")) == "0":
        said.append(
            "Redis has its append-only file off, so that a restart loses committed steps: "
            "redis-cli CONFIG SET appendonly yes, and 'appendonly yes' in redis.conf"
        )
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        said.append(
            f"Redis evicts keys when memory is short ({policy}), so that runs would vanish: "
            "redis-cli CONFIG SET maxmemory-policy noeviction, and the same in redis.conf"
        )
    return said


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
