"""Work on the healthy masters of a real Redis Cluster while another one is away for long."""

import math
from collections.abc import AsyncIterator, Iterator

import pytest
from support.deadlines import until
from support.runs.stored_runs import Bench, bench
from support.servers.redis_cluster import RedisCluster, redis_cluster
from support.servers.redis_servers import RedisServer

from stepfleet.orchestrator.redis_client.cluster import slot_of
from stepfleet.orchestrator.store import feeds as feeds_module
from stepfleet.worker.runtime import rescuer as rescuer_module
from stepfleet.worker.runtime.rescuer import Rescuer

# Nodes that are seldom run vote late.
pytestmark = pytest.mark.timeout(420)
LONG = 120.0


@pytest.fixture
def own_cluster() -> Iterator[RedisCluster]:
    """Three masters. A killed one has all that it acknowledged."""
    with redis_cluster(appendfsync="always") as made:
        yield made


@pytest.fixture
async def desk(
    own_cluster: RedisCluster, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Bench]:
    """As patient with Redis as a worker, which waits for a shard for a second."""
    redis_server.flush()
    monkeypatch.setattr(rescuer_module, "SHARD_SECONDS", 1.0)
    monkeypatch.setattr(feeds_module, "SHARD_SECONDS", 1.0)
    async with bench(
        own_cluster.url, broker_url=redis_server.url, lease=0.5, grace=0.2, patience=300
    ) as opened:
        opened.opened.connection.patience = math.inf
        yield opened
        opened.opened.connection.patience = 1.0


async def some_runs(desk: Bench, cluster: RedisCluster, away: RedisServer) -> tuple[int, int]:
    """Create runs; return how many of them will be away and how many not."""
    gone = cluster.slots_of(away)
    there = [slot_of(desk.opened.keys.run(await desk.create())) in gone for _ in range(30)]
    assert any(there)
    assert not all(there)
    return sum(there), len(there) - sum(there)


async def test_overdue_runs_of_other_masters_are_dispatched_again(
    desk: Bench, own_cluster: RedisCluster
) -> None:
    """DIST-10; those of the master that was away come when it is back."""
    opened, dead = desk.opened, own_cluster.masters[1]
    lost, kept = await some_runs(desk, own_cluster, dead)
    dead.kill()
    rescuer = Rescuer(
        *(opened.connection, opened.keys, opened.dispatch),
        grace=3600.0,
        interval=0.1,
        long_queue=1000,
        jitter=lambda: 0.5,
    )
    found = 0

    async def are_found(count: int) -> bool:
        nonlocal found
        found += await rescuer.rescue()
        return found == count

    try:
        await until(lambda: are_found(kept), within=LONG, what="a rescue of the others")
        dead.start()
        await until(lambda: are_found(kept + lost), within=LONG, what="a rescue of all")
        assert await rescuer.rescue() == 0
    finally:
        rescuer.forget()


async def test_feeds_of_a_master_that_is_away_are_switched_on_when_it_is_back(
    desk: Bench, own_cluster: RedisCluster
) -> None:
    opened, dead = desk.opened, own_cluster.masters[1]
    marks = [f"{opened.keys.tag(shard)}feed:on" for shard in range(opened.keys.shards)]
    gone = own_cluster.slots_of(dead)
    feeds = opened.feeds
    dead.kill()
    await feeds.switch_on()
    for mark in marks:
        if slot_of(mark) not in gone:
            assert await opened.connection.execute("GET", mark) == "1"
    dead.start()

    async def all_are_on() -> bool:
        on = await opened.connection.execute_all(*(("GET", mark) for mark in marks))
        return on == ["1"] * len(marks)

    await until(all_are_on, within=LONG, what="feeds that are on")
