import pytest
from redis.crc import REDIS_CLUSTER_HASH_SLOTS as SLOTS
from redis.crc import key_slot

from stepfleet.orchestrator.redis_client.cluster import (
    Topology,
    guarded,
    key_of,
    newest,
    slot_of,
)
from stepfleet.orchestrator.store.keys import Keys

A, B, C = ("a", 1), ("b", 2), ("c", 3)


@pytest.mark.parametrize(
    "key",
    ["sf:{s07}:run:x", "sf:agents", "sf:{b:1}:manifest", "x{}y", "{}{a}", "a{b", "{a}{b}", "ü"],
)
def test_a_key_has_the_slot_that_redis_gives_it(key: str) -> None:
    assert slot_of(key) == key_slot(key.encode())


def test_all_keys_of_a_shard_share_a_slot() -> None:
    keys = Keys(16)
    shard = keys.shard_of("r1")
    own = (keys.run("r1"), keys.due(shard), keys.batch(shard, "b"), keys.ended(shard, "b"))
    assert len({slot_of(key) for key in own}) == 1


@pytest.mark.parametrize(
    ("command", "key"),
    [
        (("HGET", "k", "f"), "k"),
        (("EVALSHA", "digest", 2, "k1", "k2", "argument"), "k1"),
        (("PUBLISH", "channel", "text"), None),
        (("TIME",), None),
        (("INFO", "server"), None),
        (("SCRIPT", "LOAD", "return 1"), None),
    ],
)
def test_a_command_goes_to_the_slot_of_its_key(
    command: tuple[object, ...], key: str | None
) -> None:
    assert key_of(command) == key


def test_a_script_names_one_more_key_of_its_slot() -> None:
    command = guarded(("EVALSHA", "digest", 2, "sf:{s07}:run:x", "sf:{s07}:due", "x", 5))
    assert command == (
        *("EVALSHA", "digest", 3),
        *("sf:{s07}:run:x", "sf:{s07}:due", "sf:{s07}:never", "x", 5),
    )
    assert slot_of("sf:{s07}:never") == slot_of("sf:{s07}:due")
    assert guarded(("HGET", "k", "f")) == ("HGET", "k", "f")


def test_a_topology_says_who_owns_a_slot_and_who_nobody() -> None:
    told = [[0, 9, ["b", 2, "id"], ["c", 3, "id"]], [20, SLOTS - 1, ["", 1, "id"]]]
    info = "cluster_state:ok\r\ncluster_current_epoch:7\r\n"
    topology = Topology.parse(A, told, info)
    assert topology.owners[:21] == (*[B] * 10, *[None] * 10, A)
    assert topology.masters == (B, A)
    assert topology.replicas == {C}
    assert (topology.epoch, topology.sound) == (7, True)


def test_the_newest_topology_is_believed_and_of_two_that_of_a_sound_node() -> None:
    nobody = (None,) * SLOTS
    old = Topology(nobody, epoch=3)
    cut_off = Topology(nobody, epoch=4, sound=False)
    new = Topology(nobody, epoch=4)
    assert newest([old, cut_off, new]) is new
    assert newest([cut_off, old]) is cut_off
