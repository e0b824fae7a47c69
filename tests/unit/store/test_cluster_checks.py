from stepfleet.orchestrator.store.fleet import checks
from stepfleet.orchestrator.store.fleet.checks import State
from stepfleet.orchestrator.store.fleet.servers import ClusterFacts, worst_of

SOUND = ClusterFacts(sound=True, masters=3, replicas=3, shards=(6, 5, 5))


def test_a_sound_cluster_is_good() -> None:
    found = checks.cluster(SOUND)
    assert {one.state for one in found} == {State.OK}
    assert [one.found for one in found] == ["3 masters, 3 replicas", "on the masters: 6, 5, 5"]


def test_slots_that_nobody_serves_make_the_check_fail() -> None:
    down = ClusterFacts(sound=False, masters=2, replicas=0, unserved=5461, shards=(8, 8))
    first = checks.cluster(down)[0]
    assert first.state is State.FAIL
    assert "5461 slots are not served" in first.found
    assert "promote their replicas" in first.fix


def test_a_master_without_a_replica_a_master_without_a_shard_and_a_move_are_warned_of() -> None:
    facts = ClusterFacts(
        sound=True, masters=3, replicas=2, alone=("h3:7000",), moving=1, shards=(9, 7, 0)
    )
    alone, spread, moving = checks.cluster(facts)
    assert {alone.state, spread.state, moving.state} == {State.WARN}
    assert "h3:7000" in alone.found
    assert "STEPFLEET_SHARDS=256" in spread.fix
    assert "1 slots are migrating" in moving.found


def test_of_several_servers_the_worst_is_judged() -> None:
    sound = {"redis_version": "7.0.15", "aof_enabled": 1, "maxmemory_policy": "noeviction"}
    other = {"redis_version": "6.2.1", "aof_enabled": 0, "maxmemory_policy": "allkeys-lru"}
    assert worst_of([sound, {**sound, "port": 2}]) == sound
    assert worst_of([sound, other, sound]) == other
    assert worst_of([sound, {}]) == sound
