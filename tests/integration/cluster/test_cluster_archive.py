"""The archive on a real Redis Cluster: the tests for one Redis; each script is of one slot."""

from support.documents.same_tests import borrowed
from support.servers.cluster_fixtures import one_slot_scripts, redis_url

__all__ = ["one_slot_scripts", "redis_url"]

# These look at the keys of one server.
ELSEWHERE = (
    "test_a_purge_removes_archived_runs_only_where_it_is_told",
    "test_an_interrupted_return_leaves_the_archived_run",
)
globals().update(borrowed("test_restoring", without=ELSEWHERE))
