"""A fleet whose archive all clients know of: with a new one the first move waits for seconds."""

from redis import Redis

from stepfleet.orchestrator.store.keys import ARCHIVE_STATE


def long_known(redis_url: str) -> None:
    """Say that the fleet has had an archive for long."""
    with Redis.from_url(redis_url) as redis:
        redis.hset(ARCHIVE_STATE, "gathered", "1")
