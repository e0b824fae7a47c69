"""The same model against a real Redis Cluster, whose slots move; the broker is beside it.

What a script does elsewhere is a second call here: messages may come twice, and are never missing.
"""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from support.protocol.audit import tag
from support.protocol.machine import ProtocolMachine, run_machine
from support.protocol.model import SHARDS
from support.protocol.rig import cluster_rig
from support.servers.cluster_fixtures import one_slot_scripts
from support.servers.redis_cluster import redis_cluster
from support.servers.redis_servers import RedisServer

from stepfleet.orchestrator.redis_client.cluster import slot_of

__all__ = ["one_slot_scripts"]

LONG = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    database=None,
    derandomize=True,
    report_multiple_bugs=False,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)
SOAK = settings(LONG, max_examples=500, stateful_step_count=100, derandomize=False)
MOVES = 8


class MovingMachine(ProtocolMachine):
    """Now and then a shard moves to another master, with all that it holds."""

    @rule(shard=st.integers(0, SHARDS - 1), chance=st.integers(0, MOVES))
    def shard_moves(self, shard: int, chance: int) -> None:
        cluster = self.rig.cluster
        if cluster is None or chance:
            return
        with self.operation("move"):
            slot = slot_of(tag(shard))
            owner = cluster.owner(slot)
            others = [one for one in cluster.masters if one is not owner]
            cluster.move(slot, random.Random(self.rig.operations).choice(others))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_random_operations_keep_the_invariants_on_a_cluster(
    redis_server: RedisServer, one_slot_scripts: None
) -> None:
    """DIST-03, DIST-04, DIST-05, DIST-06, DIST-08, DIST-10, DIST-13: always the same examples."""
    played(redis_server, LONG, least=2_000)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_other_random_operations_keep_the_invariants_on_a_cluster(
    redis_server: RedisServer, one_slot_scripts: None
) -> None:
    """Other examples in each run."""
    played(redis_server, SOAK, least=10_000)


def played(broker: RedisServer, profile: settings, least: int) -> None:
    """Play random examples on a cluster of its own; assert that there were enough operations."""
    with redis_cluster() as cluster, cluster_rig(cluster, broker.url) as shared:
        run_machine(shared, profile, MovingMachine)
    assert shared.operations > least
    assert shared.told["move"] > 10
