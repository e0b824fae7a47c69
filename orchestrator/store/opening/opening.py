"""Opens the store that the settings name: the one place where clients are made of URLs."""

import asyncio
import re
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from celery import Celery
from redis import exceptions
from redis.asyncio import Redis

from stepfleet.orchestrator.errors import ConfigurationError, StoreError
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.redis_client.node import RenewablePool, pack_faster
from stepfleet.orchestrator.redis_client.sentinel import master_pool
from stepfleet.orchestrator.redis_client.urls import (
    is_cluster,
    is_sentinel,
    parse_cluster,
    parse_sentinel,
)
from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.configs import Configs
from stepfleet.orchestrator.store.dispatch import Dispatch
from stepfleet.orchestrator.store.keys import Keys
from stepfleet.orchestrator.store.opening.brokers import kombu_conf, kombu_url
from stepfleet.orchestrator.store.opening.clusters import FirstContact, cluster_connection

SILENCE_SECONDS = 5.0
FIRST_CONTACT_SECONDS = 5.0
_PAUSE_SECONDS = 0.1
_PROTOCOL = 2  # replies of streams and scores differ in RESP3
LARGEST_SHARDS = 4096


@dataclass(frozen=True, slots=True)
class OpenStore:
    """An open store: the collaborators of everything that reads or writes runs."""

    settings: Settings
    connection: Connection
    keys: Keys
    configs: Configs
    dispatch: Dispatch

    async def aclose(self) -> None:
        """Disconnect."""
        await self.connection.aclose()


def celery_app(settings: Settings, **conf: Any) -> Celery:
    """Return a Celery app that sends and accepts JSON only and keeps no results."""
    app = Celery("stepfleet", broker=kombu_url(settings.broker), set_as_current=False)
    own = kombu_conf(settings.broker, settings.queue_prefix)
    own["broker_transport_options"] |= conf.pop("broker_transport_options", {})
    app.conf.update(
        **own,
        task_serializer="json",
        accept_content=["json"],
        result_backend=None,
        task_ignore_result=True,
        task_default_queue=settings.queue,
        broker_connection_retry_on_startup=True,
        **conf,
    )
    return app


def client_app(settings: Settings) -> Celery:
    """Return the Celery app of a client, which only sends: plain transports, short waits."""
    app = celery_app(settings, broker_connection_timeout=SILENCE_SECONDS)
    # A worker's batched transport reads the same lists; kombu's own suffices to write to them.
    app.conf.broker_url = re.sub(r"^(rediss?)-batch", r"\1", kombu_url(settings.broker))
    return app


async def open_store(settings: Settings, app: Celery | None = None) -> OpenStore:
    """Connect, and fix the number of shards if this is the store's first use.

    The store's own number holds where the settings leave it to the default. Raises `StoreError`
    after a few seconds when Redis cannot be reached, `ConfigurationError` when the URL is
    unusable, the password is refused, or the settings ask for another number of shards.
    """
    in_script = settings.enqueues_in_script
    connection, client = _connection(settings)
    try:
        shards = await _first_contact(client, settings)
    except BaseException:
        await connection.aclose()
        raise
    names = Keys(shards, settings.prefix)
    return OpenStore(
        settings,
        connection,
        names,
        Configs(connection, names),
        Dispatch(
            app or client_app(settings),
            connection,
            settings.queue,
            in_script=in_script,
            signing=settings.signing,
            prefix=settings.queue_prefix,
        ),
    )


def place_of(url: str) -> str:
    """Return where a URL points to, without user and password."""
    if is_sentinel(url):
        return parse_sentinel(url).location
    if is_cluster(url):
        return parse_cluster(url).location
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return parts.path
    return f"{parts.hostname or 'localhost'}:{parts.port or 6379}"


def _connection(settings: Settings) -> tuple[Connection, Redis | FirstContact]:
    """Return the connection, and a client of it for the first reads, which do not wait."""
    if is_cluster(settings.store):
        cluster = cluster_connection(settings, **_options(settings))
        return cluster, FirstContact(cluster.cluster)
    client = _client(settings)
    return Connection(client, patience=settings.patience), client


def _options(settings: Settings) -> dict[str, Any]:
    return {
        "max_connections": settings.connections,
        "timeout": settings.patience or None,
        "decode_responses": True,
        "protocol": _PROTOCOL,
        "socket_connect_timeout": SILENCE_SECONDS,
        "socket_timeout": SILENCE_SECONDS,
        "health_check_interval": 30,
    }


def _client(settings: Settings) -> Redis:
    url = settings.store
    make_pool = master_pool if is_sentinel(url) else RenewablePool.from_url
    pool = make_pool(url, **_options(settings))
    pack_faster(pool)
    return Redis.from_pool(pool)


async def _first_contact(client: Redis | FirstContact, settings: Settings) -> int:
    """Return the store's number of shards; wait a little for a server that just starts."""
    where = place_of(settings.store)
    deadline = time.monotonic() + min(FIRST_CONTACT_SECONDS, settings.patience)
    loaded_by = time.monotonic() + settings.patience
    while True:
        try:
            return await _shards(client, settings)
        except (exceptions.AuthenticationError, exceptions.NoPermissionError) as error:
            msg = (
                f"Redis at {where} refuses the credentials: {error}; put the right ones into "
                "STEPFLEET_REDIS_URL (redis://USER:PASSWORD@host:6379/0)"
            )
            raise ConfigurationError(msg) from None
        except (exceptions.ConnectionError, exceptions.TimeoutError, OSError) as error:
            loading = isinstance(error, exceptions.BusyLoadingError)
            if time.monotonic() >= (loaded_by if loading else deadline):
                why = str(error).rstrip(".")
                msg = (
                    f"Redis at {where} cannot be reached: {why}; start it, or correct "
                    "STEPFLEET_REDIS_URL"
                )
                raise StoreError(msg) from None
        except exceptions.MovedError:
            msg = (
                f"Redis at {where} is a node of a Redis Cluster; write "
                f"STEPFLEET_REDIS_URL=redis+cluster://{where}"
            )
            raise ConfigurationError(msg) from None
        except exceptions.RedisError as error:
            raise StoreError(f"Redis at {where} refuses: {error}") from None
        await asyncio.sleep(_PAUSE_SECONDS)


async def _shards(client: Redis | FirstContact, settings: Settings) -> int:
    key = settings.prefix + keys.SHARDS
    stored = await client.get(key)
    if stored is None:  # a full Redis refuses even a write that changes nothing
        await client.setnx(key, settings.shards)
        stored = await client.get(key)
    shards = int(stored) if stored and stored.isdigit() else 0
    if not 1 <= shards <= LARGEST_SHARDS:
        msg = f"key {key!r} holds {stored!r}; this is no store of Stepfleet: name another"
        raise ConfigurationError(msg)
    if shards != settings.shards and "shards" in settings.model_fields_set:
        msg = (
            f"this store was set up with {shards} shards and the settings say "
            f"{settings.shards}; set STEPFLEET_SHARDS={shards}, or leave it out"
        )
        raise ConfigurationError(msg)
    return shards
