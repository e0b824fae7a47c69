"""Fixtures of integration tests: a client, a store, a scripted run, a Redis Cluster."""

from collections.abc import AsyncIterator, Iterator
from functools import partial

import pytest
from support.runs.opened_runs import Opened, opened_run
from support.runs.stored_runs import Bench, bench
from support.servers.redis_cluster import RedisCluster, redis_cluster

from stepfleet.orchestrator import AsyncFleet


@pytest.fixture
async def fleet(redis_url: str) -> AsyncIterator[AsyncFleet]:
    """A client of the test's Redis."""
    async with AsyncFleet(redis_url) as opened:
        yield opened


@pytest.fixture
async def desk(redis_url: str, request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    """A store on the test's Redis; a module's `BENCH` holds its agent and its settings."""
    async with bench(redis_url, **getattr(request.module, "BENCH", {})) as opened:
        yield opened


@pytest.fixture
def opened(redis_url: str) -> Opened:
    """Open runs with scripted models on the test's Redis: `opened(answer, ..., tools=[...])`."""
    return partial(opened_run, redis_url)


@pytest.fixture(scope="session")
def cluster() -> Iterator[RedisCluster]:
    """The session's cluster of three masters; tests that end nodes make one of their own."""
    with redis_cluster() as made:
        yield made
