"""Server checks: what about a Redis server endangers runs, and how to fix it."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from redis.exceptions import RedisError

from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.redis_client.connection import Connection


@dataclass(frozen=True, slots=True)
class HealthFinding:
    """A defect of a set-up and its fix; `about` names the subject."""

    about: str
    found: str
    fix: str

    @property
    def text(self) -> str:
        """The finding as one message."""
        return f"{self.found}. Fix: {self.fix}"


OLDEST = (7, 0)
_WORST: dict[str, Callable[[Any], Any]] = {
    "redis_version": lambda version: version_of(str(version)),
    "aof_enabled": lambda enabled: str(enabled) != "0",
    "maxmemory_policy": lambda policy: policy == "noeviction",
}
"""How to rank a judged fact: the worst server has the least."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A server's version and the settings that matter; None where it does not report them."""

    version: str | None = None
    append_only: bool | None = None
    eviction: str | None = None

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Self:
        """Return the facts in a reply to `INFO`. Valkey reports the Redis that it stands for."""
        version, append_only = info.get("redis_version"), info.get("aof_enabled")
        return cls(
            version=None if version is None else str(version),
            append_only=None if append_only is None else str(append_only) != "0",
            eviction=info.get("maxmemory_policy"),
        )


async def server_info(connection: Connection) -> dict[str, Any]:
    """Return the reply of the server to `INFO`; empty where that is forbidden.

    Of a cluster's masters each fact is that of the one which is worst off.
    """
    try:
        parts = await asyncio.gather(
            *(connection.everywhere("INFO", part) for part in ("server", "persistence", "memory"))
        )
    except (RedisError, AgentException):
        return {}
    servers = [
        {name: value for part in server for name, value in part.items()}
        for server in zip(*parts, strict=False)
    ]
    return worst_of(servers)


def worst_of(servers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one server's facts for several: those that are judged as the worst server has them."""
    found = dict(servers[0])
    for name, rank in _WORST.items():
        values = [server[name] for server in servers if server.get(name) is not None]
        if values:
            found[name] = min(values, key=rank)
    return found


def warnings(info: Mapping[str, Any]) -> list[str]:
    """Return the findings about a server as messages; nothing for a sound one."""
    return [finding.text for finding in health_findings(ServerFacts.of(info))]


def health_findings(facts: ServerFacts) -> list[HealthFinding]:
    """Return the findings about a server; nothing for a sound one."""
    found = []
    numbers = version_of(facts.version or "")
    if numbers and numbers < OLDEST:
        found.append(
            HealthFinding(
                "version", f"Redis is version {facts.version}", "use 7.0 or newer, or Valkey"
            )
        )
    if facts.append_only is False:
        found.append(
            HealthFinding(
                "durability",
                "Redis has its append-only file off: a restart loses committed steps",
                "redis-cli CONFIG SET appendonly yes, and 'appendonly yes' in redis.conf",
            )
        )
    if facts.eviction not in (None, "noeviction"):
        found.append(
            HealthFinding(
                "eviction",
                f"Redis evicts keys when memory is short ({facts.eviction}): runs would vanish",
                "redis-cli CONFIG SET maxmemory-policy noeviction, and the same in redis.conf",
            )
        )
    return found


def version_of(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version."""
    numbers = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
