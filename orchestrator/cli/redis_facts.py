"""What a Redis server says about itself, and whether that keeps runs safe.

Asking is here, at the edge; judging is a pure function of the facts. Reads and writes no run.
"""

import contextlib
from dataclasses import dataclass
from typing import cast

import redis
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError

from stepfleet.orchestrator.cli.worry import Worry
from stepfleet.orchestrator.errors import ConfigurationError, StoreError
from stepfleet.orchestrator.store import keys

OLDEST = (7, 0)
_CONNECT_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class RedisFacts:
    """A server's version and the settings that matter; None where it does not say."""

    version: str
    append_only: bool | None
    eviction: str | None
    shards: int | None
    quarantined: int


def worries(facts: RedisFacts) -> list[Worry]:
    """Return what about the server endangers runs; nothing for a sound one."""
    found = []
    if version_of(facts.version) < OLDEST:
        found.append(
            Worry("version", f"Redis is version {facts.version}", "use 7.0 or newer, or Valkey")
        )
    if facts.append_only is False:
        found.append(
            Worry(
                "durability",
                "Redis has its append-only file off: a restart loses committed steps",
                "redis-cli CONFIG SET appendonly yes, and 'appendonly yes' in redis.conf",
            )
        )
    if facts.eviction not in (None, "noeviction"):
        found.append(
            Worry(
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


def ask(url: str) -> RedisFacts:
    """Return the server's facts, within a few seconds.

    Raises `ConfigurationError` for an unusable URL or refused credentials, `StoreError` when
    the server cannot be reached; both name the fix.
    """
    try:
        client = redis.Redis.from_url(
            url,
            decode_responses=True,
            socket_connect_timeout=_CONNECT_SECONDS,
            socket_timeout=_CONNECT_SECONDS,
            retry=None,
        )
    except ValueError as error:
        msg = f"STEPFLEET_REDIS_URL is no usable address ({error}); write redis://host:6379/0"
        raise ConfigurationError(msg) from None
    with contextlib.closing(client):
        try:
            return _facts(client)
        except (AuthenticationError, NoPermissionError) as error:
            msg = (
                f"Redis at {place(client)} refuses the credentials: {error}; put the right ones "
                "into STEPFLEET_REDIS_URL (redis://USER:PASSWORD@host:6379/0)"
            )
            raise ConfigurationError(msg) from None
        except (RedisError, OSError) as error:
            msg = (
                f"Redis at {place(client)} cannot be reached: {error}; start it, or correct "
                "STEPFLEET_REDIS_URL (unset it to use a private server)"
            )
            raise StoreError(msg) from None


def place(client: redis.Redis) -> str:
    """Return where a client connects to, without user or password."""
    options = client.connection_pool.connection_kwargs
    if "path" in options:
        return str(options["path"])
    return f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"


def _facts(client: redis.Redis) -> RedisFacts:
    info = client.info("server")
    persistence = client.info("persistence")
    memory = client.info("memory")
    shards = cast("str | None", client.get(keys.SHARDS))
    return RedisFacts(
        # Valkey answers as the Redis version that it is compatible with.
        version=str(info.get("redis_version", "unknown")),
        append_only=bool(persistence["aof_enabled"]) if "aof_enabled" in persistence else None,
        eviction=memory.get("maxmemory_policy"),
        shards=int(shards) if shards else None,
        quarantined=_length(client, keys.QUARANTINE),
    )


def _length(client: redis.Redis, key: str) -> int:
    """Return how many entries a list or stream has; 0 where there is none."""
    kind = client.type(key)
    if kind == "list":
        return client.llen(key)
    if kind == "stream":
        return client.xlen(key)
    return 0
