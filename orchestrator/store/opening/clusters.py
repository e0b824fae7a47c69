"""Makes the connection to a cluster that the settings name."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.connection import Connection as PlainConnection
from redis.asyncio.connection import SSLConnection

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.redis_client.cluster import Cluster
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.redis_client.node import RenewablePool, pack_faster
from stepfleet.orchestrator.redis_client.urls import NodeAddress, parse_cluster
from stepfleet.orchestrator.settings.settings import Settings


class ClusterConnection(Connection):
    """A connection as the store uses it, to a cluster."""

    def __init__(
        self,
        seeds: tuple[NodeAddress, ...],
        connect: Callable[[NodeAddress], Redis],
        *,
        patience: float,
    ) -> None:
        self.cluster = Cluster(seeds, connect, lambda: self.patience)
        super().__init__(self.cluster.client_of(seeds[0]), patience=patience)

    def send(self, *command: Any) -> "asyncio.Future[Any]":
        """Put one command on its way and return the future of its reply; fails as `execute`."""
        return self.cluster.send(*command)

    async def timed(self, *commands: tuple[Any, ...]) -> tuple[list[Any], float]:
        """Return the replies, or errors, of commands, and the seconds until the last one was there.

        The nodes have no clock in common, so the way there and back is part of it.
        """
        began = time.monotonic()
        sent = [self.send(*command) for command in commands]
        replies: list[Any] = await asyncio.gather(*sent, return_exceptions=True)
        return replies, time.monotonic() - began

    async def attempt(self, *command: Any) -> Any:
        """Return the reply to a command that waits for no trouble's end; raises `StoreError`."""
        return await self.cluster.attempt_soon(*command)

    async def everywhere(self, *command: Any) -> list[Any]:
        """Return all masters' replies to a command without a key; it is not repeated."""
        return await self.cluster.everywhere(*command)

    async def servers(self) -> list[Redis]:
        """Return a client of each master."""
        return await self.cluster.master_clients()

    async def aclose(self) -> None:
        """Finish what is under way and disconnect; calls that wait for Redis raise `StoreError`."""
        await self.cluster.aclose()


def cluster_connection(settings: Settings, **options: Any) -> ClusterConnection:
    """Return a connection to the cluster; `options` are redis-py's for each node's pool.

    Nothing is sent yet. Raises `ConfigurationError` for an unusable URL.
    """
    try:
        url = parse_cluster(settings.store)
    except ValueError as error:
        raise ConfigurationError(f"STEPFLEET_REDIS_URL: {error}") from None

    def connect(place: NodeAddress) -> Redis:
        pool = RenewablePool(
            connection_class=PlainConnection if url.tls is None else SSLConnection,
            host=place[0],
            port=place[1],
            username=url.username,
            password=url.password,
            **(url.tls or {}),
            **options,
        )
        pack_faster(pool)
        return Redis.from_pool(pool)

    return ClusterConnection(url.nodes, connect, patience=settings.patience)


class FirstContact:
    """Reads a cluster as `redis.asyncio.Redis` reads one server, without repetitions."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def get(self, key: str) -> Any:
        """Return a key's value."""
        return await self._once("GET", key)

    async def setnx(self, key: str, value: Any) -> Any:
        """Set a key that is not there."""
        return await self._once("SETNX", key, value)

    async def _once(self, *command: Any) -> Any:
        try:
            return await self._cluster.attempt(*command)
        except exceptions.ClusterDownError as error:
            # Passes: a cluster that just starts, or one that elects a master.
            raise exceptions.ConnectionError(f"the cluster serves no such slot: {error}") from None
        except exceptions.ResponseError as error:
            if "cluster support disabled" not in str(error):
                raise
            msg = (
                "the Redis that STEPFLEET_REDIS_URL names is no cluster; write redis://HOST:PORT/0"
            )
            raise ConfigurationError(msg) from None
