"""Fixtures of integration tests: a fleet's client, and a Redis Cluster, started when asked for."""

from collections.abc import AsyncIterator, Iterator

import pytest
from support.servers.redis_cluster import RedisCluster, redis_cluster

from stepfleet.orchestrator.client.fleet import AsyncFleet


@pytest.fixture
async def fleet(redis_url: str) -> AsyncIterator[AsyncFleet]:
    """A client of the test's Redis."""
    async with AsyncFleet(redis_url) as opened:
        yield opened


@pytest.fixture(scope="session")
def cluster() -> Iterator[RedisCluster]:
    """The session's cluster of three masters; tests that end nodes make one of their own."""
    with redis_cluster() as made:
        yield made
