"""Masters of a real Redis Cluster that die, sleep, come back, or are followed by their replica."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from support.deadlines import until
from support.runs.stored_runs import Bench, answered, bench, called
from support.servers.redis_cluster import RedisCluster, redis_cluster
from support.servers.redis_servers import RedisServer

from stepfleet.orchestrator import StoreError
from stepfleet.orchestrator.protocol.claim import Claim, Work
from stepfleet.orchestrator.redis_client.cluster import slot_of

# Nodes that are seldom run vote late.
pytestmark = pytest.mark.timeout(420)


@pytest.fixture
def own_cluster() -> Iterator[RedisCluster]:
    """Three masters, and a replica of the first. A killed one has all that it acknowledged."""
    with redis_cluster(replicas=1, appendfsync="always") as made:
        yield made


@pytest.fixture
async def desk(
    own_cluster: RedisCluster, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[Bench]:
    redis_server.flush()
    caplog.set_level(logging.WARNING, "stepfleet")
    async with bench(
        own_cluster.url, broker_url=redis_server.url, lease=600, grace=600, patience=300
    ) as opened:
        yield opened


async def some_claims(desk: Bench, cluster: RedisCluster) -> dict[int, list[Claim]]:
    """Return claims of runs by the port of the master that has them; some of each."""
    found: dict[int, list[Claim]] = {}
    slots = {server.port: cluster.slots_of(server) for server in cluster.masters}
    for _ in range(30):
        run_id = await desk.create()
        slot = slot_of(desk.opened.keys.run(run_id))
        port = next(port for port, owned in slots.items() if slot in owned)
        found.setdefault(port, []).append(await desk.claim(run_id))
    assert len(found) == len(cluster.masters)
    return found


async def end_all(desk: Bench, claims: list[Claim]) -> None:
    for claim in claims:
        assert (await desk.commit(claim, called(claim))).applied
        following = await desk.claim(claim.run_id, 1)
        assert (await desk.commit(following, answered(following))).applied


async def is_said(caplog: pytest.LogCaptureFixture, text: str) -> None:
    async def said() -> bool:
        return text in caplog.text

    await until(said, within=60, what=f"{text!r} in the log")


async def test_runs_go_on_with_the_replica_of_a_master_that_died(
    desk: Bench, own_cluster: RedisCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Runs of other masters do not wait for it; calls that wait do not hammer the cluster."""
    dead = own_cluster.masters[0]
    claims = await some_claims(desk, own_cluster)
    await asyncio.to_thread(own_cluster.replicated)
    dead.kill()
    began = time.monotonic()
    waiting = asyncio.gather(
        *(desk.commit(claim, called(claim)) for claim in claims.pop(dead.port))
    )
    await is_said(caplog, "Redis does not answer")
    for others in claims.values():
        await end_all(desk, others)
    assert all(committed.applied for committed in await waiting)
    lasted = time.monotonic() - began
    assert own_cluster.owner(0) is own_cluster.replicas[0]
    steps = len(waiting.result()) + 2 * sum(map(len, claims.values()))
    assert (await desk.counters())["steps"] == steps
    assert caplog.text.count("Redis does not answer") == 1
    surveys = own_cluster.calls_of(own_cluster.masters[1], "cluster|slots")
    assert surveys < 60 + 2 * lasted  # one a second, and those of the beginning


async def test_what_a_dead_master_has_waits_for_it_where_nobody_follows(
    desk: Bench, own_cluster: RedisCluster, caplog: pytest.LogCaptureFixture
) -> None:
    dead = own_cluster.masters[1]
    claims = await some_claims(desk, own_cluster)
    dead.kill()
    held = claims.pop(dead.port)
    waiting = asyncio.gather(*(desk.commit(claim, called(claim)) for claim in held))
    await is_said(caplog, "Redis does not answer")
    for others in claims.values():
        await end_all(desk, others)
    assert not waiting.done()
    dead.start()
    assert all(committed.applied for committed in await waiting)
    for claim in held:
        assert (await desk.header(claim.run_id))["step"] == "1"
    assert caplog.text.count("Redis does not answer") == 1


async def test_a_call_to_a_dead_master_fails_when_its_patience_ends(
    desk: Bench, own_cluster: RedisCluster
) -> None:
    dead = own_cluster.masters[1]
    claims = await some_claims(desk, own_cluster)
    dead.kill()
    desk.opened.connection.patience = 0.5
    claim = claims[dead.port][0]
    with pytest.raises(StoreError, match=r"Redis cannot be reached|bring its masters back"):
        await desk.commit(claim, called(claim))


async def test_a_master_that_sleeps_holds_nobody_up_but_its_own_runs(
    desk: Bench, own_cluster: RedisCluster
) -> None:
    asleep = own_cluster.masters[1]
    claims = await some_claims(desk, own_cluster)
    held = claims.pop(asleep.port)
    asleep.freeze()
    waiting = asyncio.gather(*(desk.commit(claim, called(claim)) for claim in held))
    for others in claims.values():
        await end_all(desk, others)
    assert not waiting.done()
    asleep.thaw()
    assert all(committed.applied for committed in await waiting)


async def test_closing_does_not_wait_for_a_master_that_is_away(
    desk: Bench, own_cluster: RedisCluster, caplog: pytest.LogCaptureFixture
) -> None:
    dead = own_cluster.masters[1]
    claims = await some_claims(desk, own_cluster)
    dead.kill()
    desk.opened.connection.patience = 3600
    claim = claims[dead.port][0]
    waiting = asyncio.create_task(desk.commit(claim, called(claim)))
    await is_said(caplog, "Redis does not answer")
    async with asyncio.timeout(60):
        await desk.opened.aclose()
    with pytest.raises(StoreError):
        await waiting


async def test_a_store_opens_while_the_first_node_of_its_address_is_away(
    desk: Bench, own_cluster: RedisCluster, redis_server: RedisServer
) -> None:
    """The nodes that answer tell of the others."""
    claims = await some_claims(desk, own_cluster)
    dead = own_cluster.masters[0]
    await asyncio.to_thread(own_cluster.replicated)
    dead.kill()

    async def opens() -> bool:
        try:
            async with bench(own_cluster.url, broker_url=redis_server.url, patience=5) as opened:
                for claim in claims[dead.port]:
                    await opened.header(claim.run_id)
                hint = Work(claims[dead.port][0].run_id, 0)
                return not isinstance(await opened.steps.claim(hint, "t"), Claim)
        except StoreError:
            return False

    assert await until(opens, within=200, what="a store that opens")
