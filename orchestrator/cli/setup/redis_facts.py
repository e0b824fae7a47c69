"""Asks a Redis server about itself, at once and without a fleet. Judges nothing; reads no run."""

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import redis
from redis.cluster import RedisCluster
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError
from redis.sentinel import MasterNotFoundError, SentinelConnectionPool

from stepfleet.orchestrator.cli.setup.cluster_facts import (
    ClusterFacts,
    asked_cluster,
    cluster_facts,
    infos,
)
from stepfleet.orchestrator.cli.terminal.output import notice
from stepfleet.orchestrator.errors import ConfigurationError, StoreError
from stepfleet.orchestrator.redis_client.sentinel import master_client
from stepfleet.orchestrator.redis_client.urls import is_cluster, is_sentinel
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.health import ServerFacts, health_findings, worst_of
from stepfleet.orchestrator.store.quarantine import about_entries, reasons

_CONNECT_SECONDS = 3.0
_PAUSE_SECONDS = 0.25

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RedisFacts:
    """What a server says of itself, and what of ours lies in it; None where it does not say.

    `refusals` tells why messages lie in quarantine, and how often.
    """

    server: ServerFacts
    shards: int | None
    quarantined: int
    refusals: dict[str, int] = field(default_factory=dict)
    cluster: ClusterFacts | None = None


def warn_of(url: str, *, patience: float = 0.0) -> None:
    """Say on standard error what about the server endangers runs. Raises what `ask` raises."""
    for finding in health_findings(ask(url, patience=patience).server):
        notice(f"WARNING: {finding.text}")


def ask(url: str, *, patience: float = 0.0) -> RedisFacts:
    """Return the server's facts, within a few seconds.

    A server that cannot be reached is asked again for `patience` seconds, and that is said.
    Raises `ConfigurationError` for an unusable URL or refused credentials, `StoreError` when
    the server cannot be reached; both name the fix.
    """
    deadline = time.monotonic() + patience
    said = False
    while True:
        try:
            return _ask_once(url)
        except StoreError:
            if time.monotonic() >= deadline:
                raise
            if not said:
                notice(f"Redis cannot be reached; it is asked again for {patience:g} s.")
                said = True
            time.sleep(_PAUSE_SECONDS)


def _ask_once(url: str) -> RedisFacts:
    if is_cluster(url):
        return asked_cluster(url, _facts_of_cluster, seconds=_CONNECT_SECONDS)
    return _asked(url, _facts)


def refused_messages(urls: Iterable[str]) -> list[dict[str, Any]]:
    """Return what is known of the messages in quarantine, the newest first.

    `urls` are of the store and the broker; what is no Redis has no quarantine. Raises as `ask`.
    """
    found = []
    for url in urls:
        if is_cluster(url):
            found += asked_cluster(url, put_aside, seconds=_CONNECT_SECONDS)
        elif is_redis(url):
            found += _asked(url, put_aside)
    return sorted(found, key=lambda one: -float(one["at"]))


def is_redis(url: str) -> bool:
    """Tell whether a broker's URL is one that `ask` understands."""
    return is_sentinel(url) or url.startswith(("redis://", "rediss://", "unix://"))


def _asked(url: str, question: Callable[[redis.Redis], T]) -> T:
    try:
        client = client_of(url)
    except ValueError as error:
        msg = f"STEPFLEET_REDIS_URL is no usable address ({error}); write redis://host:6379/0"
        raise ConfigurationError(msg) from None
    with contextlib.closing(client):
        try:
            return question(client)
        except (AuthenticationError, NoPermissionError) as error:
            msg = (
                f"Redis at {place(client)} refuses the credentials: {error}; put the right ones "
                "into STEPFLEET_REDIS_URL (redis://USER:PASSWORD@host:6379/0)"
            )
            raise ConfigurationError(msg) from None
        except MasterNotFoundError:
            msg = (
                f"Redis at {place(client)} cannot be reached: no Sentinel names a master; start "
                "them, or correct STEPFLEET_REDIS_URL"
            )
            raise StoreError(msg) from None
        except (RedisError, OSError) as error:
            msg = (
                f"Redis at {place(client)} cannot be reached: {error}; start it, or correct "
                "STEPFLEET_REDIS_URL (unset it to use a private server)"
            )
            raise StoreError(msg) from None


def client_of(url: str) -> redis.Redis:
    """Return a client of the Redis at a URL; raises `ValueError` for an unusable one."""
    plain: dict[str, Any] = {
        "decode_responses": True,
        "encoding_errors": "replace",  # what lies in quarantine is any bytes
    }
    if is_sentinel(url):
        return cast("redis.Redis", master_client(url, seconds=_CONNECT_SECONDS, **plain))
    return redis.Redis.from_url(
        url,
        socket_connect_timeout=_CONNECT_SECONDS,
        socket_timeout=_CONNECT_SECONDS,
        retry=None,
        **plain,
    )


def place(client: redis.Redis) -> str:
    """Return where a client connects to, without user or password."""
    pool: Any = client.connection_pool
    if isinstance(pool, SentinelConnectionPool):
        return f"{pool.service_name} (behind Sentinel)"
    options = pool.connection_kwargs
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
        refusals=reasons(put_aside(client)),
    )


def _facts_of_cluster(client: RedisCluster) -> RedisFacts:
    shards = cast("str | None", client.get(keys.SHARDS))
    return RedisFacts(
        server=ServerFacts.of(worst_of(infos(client, "server", "persistence", "memory"))),
        shards=int(shards) if shards else None,
        quarantined=_length(client, keys.QUARANTINE),
        refusals=reasons(put_aside(client)),
        cluster=cluster_facts(client, int(shards) if shards else keys.Keys().shards),
    )


def put_aside(client: redis.Redis | RedisCluster) -> list[dict[str, Any]]:
    """Return what is known of the messages in a server's quarantine, the newest first."""
    if client.type(keys.QUARANTINE) != "list":
        return []
    return about_entries(cast("list[str]", client.lrange(keys.QUARANTINE, 0, -1)))


def _length(client: redis.Redis | RedisCluster, key: str) -> int:
    """Return how many entries a list or stream has; 0 where there is none."""
    kind = client.type(key)
    if kind == "list":
        return client.llen(key)
    if kind == "stream":
        return client.xlen(key)
    return 0
