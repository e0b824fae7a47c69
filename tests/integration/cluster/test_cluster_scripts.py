"""Every script touches one slot of a cluster; Redis itself holds those that run here to it."""

import re

import pytest
from support.runs.stored_runs import bench
from support.servers.cluster_fixtures import STRICT, one_slot_scripts, redis_url
from support.servers.redis_cluster import RedisCluster
from support.servers.redis_servers import RedisServer

from stepfleet.orchestrator.redis_client.cluster import slot_of
from stepfleet.orchestrator.store import lua
from stepfleet.orchestrator.store.lua import run_script

__all__ = ["one_slot_scripts", "redis_url"]

FILES = sorted(lua.file_texts())
STEP = ("claim", "journal", "commit")


@pytest.mark.parametrize("name", FILES)
def test_a_script_has_all_its_keys_from_those_that_it_is_given(name: str) -> None:
    """A key that it named by itself might be in any slot."""
    code = re.sub(r"--.*", "", lua.file_texts()[name])
    assert "sf:" not in code
    assert not re.findall(r"redis\.call\('[A-Z]+',\s*'", code)


async def test_redis_refuses_a_strict_script_that_touches_two_slots(
    cluster: RedisCluster,
) -> None:
    """Also where both are on one node, which a script without the mark is not told."""
    first, second = "{a}", "{g}"
    owned = cluster.slots_of(cluster.owner(slot_of(first)))
    second = next(key for n in range(999) if slot_of(key := f"{{k{n}}}") in owned)
    text = f"redis.call('GET', KEYS[1]) return redis.call('GET', '{second}')"
    owner = cluster.owner(slot_of(first))
    assert cluster.ask(owner, "EVAL", text, 1, first) is None
    with pytest.raises(Exception, match="do not hash to the same slot"):
        cluster.ask(owner, "EVAL", STRICT + text, 1, first)


async def test_facts_are_noted_beside_a_run(redis_url: str) -> None:
    async with bench(redis_url) as desk:
        for _ in range(10):
            run_id = await desk.create()
            connection, keys = desk.opened.connection, desk.opened.keys
            await desk.opened.control.mark(run_id, "cost_from", 3)
            named = keys.script_keys(run_id, None)
            assert await run_script(connection, "clear_traces", named, run_id, "cleared", 2) == 1
            header = await desk.header(run_id)
            assert (header["cost_from"], header["cleared"]) == ("3", "2")


async def test_scripts_are_loaded_again_by_the_node_that_lost_them(
    redis_url: str, cluster: RedisCluster, redis_server: RedisServer
) -> None:
    async with bench(redis_url) as desk:
        run_ids = [await desk.create() for _ in range(10)]
        for server in cluster.masters:
            cluster.ask(server, "SCRIPT", "FLUSH")
        for run_id in run_ids:
            assert (await desk.claim(run_id)).run_id == run_id


async def test_every_master_knows_the_scripts_of_a_step_before_the_first(
    redis_url: str, cluster: RedisCluster
) -> None:
    for server in cluster.masters:
        cluster.ask(server, "SCRIPT", "FLUSH")
    async with bench(redis_url) as desk:
        await desk.steps.prepare()
        for server in cluster.masters:
            assert cluster.ask(server, "SCRIPT", "EXISTS", *map(lua.digest, STEP)) == [1, 1, 1]
