"""Opening a store on a real Redis Cluster, what goes wrong with its address, and `doctor`."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support.runs.stored_runs import bench
from support.servers.redis_cluster import RedisCluster, redis_cluster
from support.servers.redis_servers import RedisServer, free_port

from stepfleet.orchestrator import AsyncFleet, ConfigurationError, StoreError
from stepfleet.orchestrator.agents.recall import START, RedisNotes
from stepfleet.orchestrator.events.broadcast import RedisPubSub
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store.fleet.servers import redis_facts
from stepfleet.orchestrator.store.store import open_store


@pytest.fixture
def broker(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> str:
    redis_server.flush()
    monkeypatch.setenv("STEPFLEET_BROKER_URL", redis_server.url)
    return redis_server.url


@pytest.fixture(scope="module")
def guarded_cluster() -> Iterator[RedisCluster]:
    """A cluster with a password and a node of another eviction policy."""
    with redis_cluster(requirepass="s3cret:") as made:
        made.ask(made.masters[2], "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        yield made


async def refusal(url: str, **settings: Any) -> Exception:
    with pytest.raises((ConfigurationError, StoreError)) as raised:
        await open_store(load_settings(redis_url=url, patience=0.3, **settings))
    return raised.value


async def test_one_node_of_an_address_is_enough(cluster: RedisCluster, broker: str) -> None:
    cluster.flush()
    gone = f"127.0.0.1:{free_port()}"
    there = f"127.0.0.1:{cluster.masters[2].port}"
    async with bench(f"redis+cluster://{gone},{there}", shards=64) as desk:
        run_ids = [await desk.create() for _ in range(30)]
        assert desk.opened.keys.shards == 64
    async with AsyncFleet(cluster.url) as fleet:
        for run_id in run_ids:
            assert (await fleet.runs.show(run_id)).run_id == run_id


async def test_a_password_holds_for_all_nodes(guarded_cluster: RedisCluster, broker: str) -> None:
    url = guarded_cluster.url
    async with bench(url) as desk:
        for _ in range(10):
            await desk.claim(await desk.create())
    error = await refusal(url.replace("s3cret%3A", "wrong"))
    assert "refuses the credentials" in str(error)
    assert "wrong" not in str(error)


async def test_what_is_wrong_with_an_address_is_said(
    cluster: RedisCluster, redis_server: RedisServer, broker: str
) -> None:
    node = f"127.0.0.1:{cluster.masters[0].port}"
    cluster.flush()
    async with bench(cluster.url) as desk:
        assert desk.opened.keys.shards
    owner = cluster.owner_of_key("sf:shards")
    other = cluster.another(owner)
    error = await refusal(f"redis://127.0.0.1:{other.port}")
    assert f"write STEPFLEET_REDIS_URL=redis+cluster://127.0.0.1:{other.port}" in str(error)
    error = await refusal(f"redis+cluster://127.0.0.1:{redis_server.port}")
    assert "is not a cluster; write redis://HOST:PORT/0" in str(error)
    error = await refusal(f"redis+cluster://127.0.0.1:{free_port()}")
    assert "cannot be reached" in str(error)
    assert node not in str(error)


async def test_a_cluster_alone_has_no_broker(
    cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STEPFLEET_BROKER_URL", raising=False)
    assert "set STEPFLEET_BROKER_URL" in str(await refusal(cluster.url))


async def test_runs_through_one_node_of_a_cluster_are_refused_with_the_address_to_write(
    cluster: RedisCluster, broker: str
) -> None:
    cluster.flush()
    async with bench(cluster.url):
        owner = cluster.owner_of_key("sf:shards")
    async with bench(f"redis://127.0.0.1:{owner.port}") as desk:
        with pytest.raises(ConfigurationError, match=r"STEPFLEET_REDIS_URL=redis\+cluster://"):
            await asyncio.gather(*(desk.create() for _ in range(100)))


async def test_a_fleets_overview_and_warnings_are_of_all_nodes(
    guarded_cluster: RedisCluster, broker: str
) -> None:
    url = guarded_cluster.url
    async with AsyncFleet(url) as fleet:
        await fleet.check()
        assert any("allkeys-lru" in warning for warning in await fleet.warnings())
        assert (await fleet.overview()).queue_length == 0


async def test_channels_and_notes_work_on_a_cluster(cluster: RedisCluster) -> None:
    notes = RedisNotes(cluster.url, "shared")
    await notes.append("first")
    assert (await notes.after(START)).notes == ("first",)
    await notes.clear()
    assert (await notes.after(START)).notes == ()
    await notes.aclose()
    with cluster.client(cluster.masters[2]) as client, client.pubsub() as ear:
        ear.subscribe("agent.r1")
        assert ear.get_message(timeout=60)["type"] == "subscribe"
        pubsub = RedisPubSub.at(cluster.url)
        await pubsub.broadcast("agent.r1", {"a": 1})
        assert ear.get_message(timeout=60)["data"] == '{"a":1}'
        await pubsub.aclose()


def test_facts_tell_of_masters_replicas_shards_and_moves(cluster: RedisCluster) -> None:
    cluster.flush()
    facts = redis_facts(cluster.url).cluster
    assert facts is not None
    assert (facts.sound, facts.masters, facts.replicas) == (True, 3, 0)
    assert len(facts.alone) == 3
    assert (sum(facts.shards), facts.unserved, facts.moving) == (16, 0, 0)
    slot = min(cluster.slots_of(cluster.masters[0]))
    cluster.begin_move(slot, cluster.masters[1])
    assert redis_facts(cluster.url).cluster.moving == 1  # type: ignore[union-attr]
    cluster.end_move(slot, cluster.masters[1])


def test_doctor_judges_the_cluster(guarded_cluster: RedisCluster, broker: str) -> None:
    url = guarded_cluster.url
    answer = subprocess.run(
        [sys.executable, "-m", "stepfleet.orchestrator.cli", "doctor", "--json"],
        env={**os.environ, "STEPFLEET_REDIS_URL": url, "STEPFLEET_BROKER_URL": broker},
        capture_output=True,
        check=False,
        timeout=110,
    )
    found = {one["check"]: one for one in json.loads(answer.stdout)}
    assert found["cluster"]["state"] == "warn"
    assert found["cluster"]["found"].startswith("3 masters, 0 replicas; no replica has 127.0.0.1:")
    assert found["cluster's shards"]["found"].startswith("on the masters: ")
    assert found["Redis eviction"]["state"] == "fail"
    assert found["Redis durability"]["state"] == "ok"
    assert "s3cret" not in answer.stdout.decode() + answer.stderr.decode()
