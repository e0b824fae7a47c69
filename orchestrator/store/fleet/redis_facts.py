"""Reads the facts of a Redis server or cluster, without a fleet. Judges nothing; reads no run."""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import redis
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    RedisClusterException,
    RedisError,
)
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError

from stepfleet.orchestrator.errors import ConfigurationError, StoreError
from stepfleet.orchestrator.redis_client.clients import plain_cluster_client
from stepfleet.orchestrator.redis_client.sentinel import master_client, sentinel_options
from stepfleet.orchestrator.redis_client.urls import (
    is_cluster,
    is_sentinel,
    parse_cluster,
    parse_sentinel,
)
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.fleet import cluster_facts as clusters
from stepfleet.orchestrator.store.fleet.cluster_facts import ClusterFacts
from stepfleet.orchestrator.store.fleet.health import ServerFacts, worst_of
from stepfleet.orchestrator.store.fleet.quarantine import about_entries, reasons

_CONNECT_SECONDS = 3.0

T = TypeVar("T")
Client = redis.Redis | RedisCluster


@dataclass(frozen=True, slots=True)
class RedisFacts:
    """A server's or cluster's facts, and the store's own in it; `shards` is None without a store.

    `refusals` counts the reasons of the messages in quarantine.
    """

    server: ServerFacts
    shards: int | None
    quarantined: int
    refusals: dict[str, int] = field(default_factory=dict)
    cluster: ClusterFacts | None = None


def redis_facts(url: str, *, prefix: str = "") -> RedisFacts:
    """Return the facts of the server or cluster at `url`, and of the store with that prefix.

    Raises as `query`.
    """
    return query(url, partial(_facts, prefix))


def refused_messages(urls: Iterable[str], prefix: str = "") -> list[dict[str, Any]]:
    """Return the facts of the messages in quarantine, the newest first.

    `urls` are of the store and the broker; a broker that is no Redis has no quarantine. Raises as
    `query`.
    """
    found = [
        one for url in urls if is_redis(url) for one in query(url, partial(_quarantine, prefix))
    ]
    return sorted(found, key=lambda one: -float(one["at"]))


def is_redis(url: str) -> bool:
    """Return whether a broker's URL is one of Redis."""
    schemes = ("redis://", "rediss://", "unix://")
    return is_cluster(url) or is_sentinel(url) or url.startswith(schemes)


def query(url: str, read: Callable[[Client], T], *, seconds: float = _CONNECT_SECONDS) -> T:
    """Return what `read` returns for a client; `seconds` is how long each node may be silent.

    Raises `ConfigurationError` for an unusable URL or refused credentials, `StoreError` for an
    unreachable server; both name the fix.
    """
    try:
        place = _place(url)
    except ValueError as error:
        msg = f"STEPFLEET_REDIS_URL is no usable address ({error}); write redis://host:6379/0"
        raise ConfigurationError(msg) from None
    try:
        with contextlib.closing(_client(url, seconds)) as client:
            return read(client)
    except (AuthenticationError, NoPermissionError) as error:
        msg = (
            f"Redis at {place} refuses the credentials: {error}; put the right ones into "
            f"STEPFLEET_REDIS_URL ({url.partition('://')[0]}://USER:PASSWORD@host:6379)"
        )
        raise ConfigurationError(msg) from None
    # The client's own exception for a cluster of which no node answers is no RedisError.
    except (RedisError, RedisClusterException, OSError) as error:
        lacks = isinstance(error, MasterNotFoundError)
        why = "no Sentinel names a master" if lacks else str(error).rstrip(".")
        msg = (
            f"Redis at {place} cannot be reached: {why}; start it, or correct STEPFLEET_REDIS_URL "
            "(unset it to use a private server)"
        )
        raise StoreError(msg) from None


def infos(client: Client, *sections: str) -> list[dict[str, Any]]:
    """Return sections of `INFO`: one server's, or each master's of a cluster.

    Each section in a call of its own: a server before Redis 7 refuses several in one.
    """
    if isinstance(client, RedisCluster):
        return clusters.infos(client, *sections)
    return [{name: value for one in sections for name, value in client.info(one).items()}]


def _client(url: str, seconds: float) -> Client:
    plain: dict[str, Any] = {
        "decode_responses": True,
        "encoding_errors": "replace",  # messages in quarantine are any bytes
    }
    if is_sentinel(url):
        return cast("redis.Redis", master_client(url, seconds=seconds, **plain))
    plain |= {"socket_connect_timeout": seconds, "socket_timeout": seconds}
    if is_cluster(url):
        return plain_cluster_client(url, retry=Retry(NoBackoff(), 1), **plain)
    return redis.Redis.from_url(url, retry=None, **plain)


def _place(url: str) -> str:
    """Return where a URL leads, without user or password. Raises `ValueError`."""
    if is_cluster(url):
        return parse_cluster(url).location
    if is_sentinel(url):
        return f"{parse_sentinel(url).service} (behind Sentinel)"
    options = redis.ConnectionPool.from_url(url).connection_kwargs
    if "path" in options:
        return str(options["path"])
    return f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"


def _facts(prefix: str, client: Client) -> RedisFacts:
    stored = cast("str | None", client.get(prefix + keys.SHARDS))
    shards = int(stored) if stored else None
    cluster = None
    if isinstance(client, RedisCluster):
        cluster = clusters.cluster_facts(client, shards or keys.Keys().shards)
    refused = _quarantine(prefix, client)
    return RedisFacts(
        server=ServerFacts.of(worst_of(infos(client, "server", "persistence", "memory"))),
        shards=shards,
        quarantined=len(refused),
        refusals=reasons(refused),
        cluster=cluster,
    )


def _quarantine(prefix: str, client: Client) -> list[dict[str, Any]]:
    """Return the facts of the messages in quarantine, the newest first."""
    key = prefix + keys.QUARANTINE
    if client.type(key) != "list":
        return []
    return about_entries(cast("list[str]", client.lrange(key, 0, -1)))


@dataclass(frozen=True, slots=True)
class SentinelFacts:
    """The state of Sentinels: how many the URL names, how many answer, and the master's replicas.

    `known` counts the Sentinels that know each other, `quorum` how many must agree that the
    master is down.
    """

    named: int
    answering: int
    known: int
    quorum: int
    replicas: int


def sentinel_facts(url: str) -> SentinelFacts:
    """Return the facts of the Sentinels of `url`, within a second each."""
    parsed = parse_sentinel(url)
    once = Retry(NoBackoff(), 0)
    states: list[Any] = []
    for host, port in parsed.sentinels:
        client = redis.Redis(host=host, port=port, retry=once, **sentinel_options(parsed))
        with contextlib.closing(client), contextlib.suppress(RedisError, OSError):
            states.append(client.sentinel_master(parsed.service))
    return SentinelFacts(
        named=len(parsed.sentinels),
        answering=len(states),
        known=max((int(one["num-other-sentinels"]) + 1 for one in states), default=0),
        quorum=max((int(one["quorum"]) for one in states), default=0),
        replicas=max((int(one["num-slaves"]) for one in states), default=0),
    )
