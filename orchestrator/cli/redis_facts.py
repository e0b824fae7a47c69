"""Asks a Redis server about itself, at once and without a fleet. Judges nothing; reads no run."""

import contextlib
from dataclasses import dataclass
from typing import Any, cast

import redis
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError

from stepfleet.orchestrator.cli.output import notice
from stepfleet.orchestrator.errors import ConfigurationError, StoreError
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.soundness import ServerFacts, worries

_CONNECT_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class RedisFacts:
    """What a server says of itself, and what of ours lies in it; None where it does not say."""

    server: ServerFacts
    shards: int | None
    quarantined: int


def warn_of(url: str) -> None:
    """Say on standard error what about the server endangers runs. Raises what `ask` raises."""
    for worry in worries(ask(url).server):
        notice(f"WARNING: {worry.text}")


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
    info: dict[str, Any] = {}
    for section in ("server", "persistence", "memory"):
        info.update(client.info(section))
    shards = cast("str | None", client.get(keys.SHARDS))
    return RedisFacts(
        server=ServerFacts.of(info),
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
