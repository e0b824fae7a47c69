"""Fixtures of integration tests: a Redis Cluster, started with the first test that asks for it."""

from collections.abc import Iterator

import pytest
from redis_cluster import RedisCluster, redis_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[RedisCluster]:
    """The session's cluster of three masters; tests that end nodes make one of their own."""
    with redis_cluster() as made:
        yield made
