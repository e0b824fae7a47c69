"""Purging on a real Redis Cluster: the tests for one Redis."""

from support.documents.same_tests import borrowed
from support.servers.cluster_fixtures import one_slot_scripts, redis_url

__all__ = ["one_slot_scripts", "redis_url"]

# This one fills a Redis of its own; that one reads the names of one server.
ELSEWHERE = (
    "test_a_full_redis_can_be_purged",
    "test_a_batch_that_is_purged_whole_is_forgotten_and_others_stay",
)
globals().update(borrowed("test_purging", without=ELSEWHERE))
