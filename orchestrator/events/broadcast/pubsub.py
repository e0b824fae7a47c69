"""Broadcasts over Redis pub/sub, on the channel `agent.<run id>`.

Pub/sub keeps nothing: late readers use the run's event log (`fleet.runs.events`).
"""

from typing import Any, Self

from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.exceptions import ConnectionError, RedisClusterException  # noqa: A004 - redis's own

from stepfleet.orchestrator.events.broadcast.port import Envelope
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.redis_client.clients import client_of

SECONDS = 5.0


class RedisPubSub:
    """Publishes envelopes as JSON. Raises `redis.exceptions.RedisError` where Redis is away."""

    def __init__(self, client: "Redis | RedisCluster") -> None:
        self._client = client

    @classmethod
    def at(cls, url: str) -> Self:
        """Return a broadcaster with a connection of its own to the Redis at `url`."""
        bounds: dict[str, Any] = {"socket_timeout": SECONDS, "socket_connect_timeout": SECONDS}
        return cls(client_of(url, **bounds))

    async def broadcast(self, channel: str, envelope: Envelope) -> None:
        """Publish one envelope."""
        try:
            await self._client.publish(channel, exact_json.dumps(dict(envelope)))
        except RedisClusterException as error:  # no node answers; the client's is no RedisError
            raise ConnectionError(str(error)) from error

    async def aclose(self) -> None:
        """Disconnect."""
        await self._client.aclose()
