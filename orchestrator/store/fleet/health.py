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
    """A defect of a set-up and its fix; `about` names the subject. `stops`: work stands still."""

    about: str
    found: str
    fix: str
    stops: bool = False

    @property
    def text(self) -> str:
        """The finding as one message."""
        return f"{self.found}. Fix: {self.fix}"


OLDEST = (7, 0)
_WORST: dict[str, Callable[[Any], Any]] = {
    "redis_version": lambda version: version_of(str(version)),
    "aof_enabled": lambda enabled: str(enabled) != "0",
    "maxmemory_policy": lambda policy: policy == "noeviction",
    "aof_last_write_status": lambda status: status == "ok",
    "rdb_last_bgsave_status": lambda status: status == "ok",
    "full": lambda full: not full,
}
"""How to rank a judged fact: the worst server has the least."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A server's version, the settings that matter, and whether it takes writes.

    None where it does not report them. `full`: its memory is used up; `writes`: to its disk.
    """

    version: str | None = None
    append_only: bool | None = None
    eviction: str | None = None
    full: bool | None = None
    writes: bool | None = None

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Self:
        """Return the facts in a reply to `INFO`. Valkey reports the Redis that it stands for."""
        version, append_only = info.get("redis_version"), info.get("aof_enabled")
        return cls(
            version=None if version is None else str(version),
            append_only=None if append_only is None else str(append_only) != "0",
            eviction=info.get("maxmemory_policy"),
            full=info.get("full", _is_full(info)),
            writes=_writes(info),
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
    servers = [{**one, "full": _is_full(one)} if "maxmemory" in one else one for one in servers]
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
    if facts.full:
        found.append(
            HealthFinding(
                "memory",
                "Redis is full: it refuses commands, and all steps wait",
                "raise its maxmemory (redis-cli CONFIG SET maxmemory 8gb), or remove ended runs "
                "(stepfleet purge)",
                stops=True,
            )
        )
    if facts.writes is False:
        found.append(
            HealthFinding(
                "disk",
                "Redis cannot write to its disk: it refuses commands, and all steps wait",
                "make room on that disk, see Redis's log",
                stops=True,
            )
        )
    return found


def _is_full(info: Mapping[str, Any]) -> bool | None:
    """Return whether a server refuses writes for lack of memory."""
    used, most = info.get("used_memory"), info.get("maxmemory")
    if used is None or most is None:
        return None
    return 0 < int(most) < int(used) - int(info.get("mem_not_counted_for_evict", 0))


def _writes(info: Mapping[str, Any]) -> bool | None:
    """Return whether a server's disk takes its data, by its newest attempts."""
    states = [info.get(name) for name in ("aof_last_write_status", "rdb_last_bgsave_status")]
    known = [str(state) == "ok" for state in states if state is not None]
    return all(known) if known else None


def version_of(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version."""
    numbers = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
