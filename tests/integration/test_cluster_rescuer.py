"""The rescuer on a real Redis Cluster: the tests for one Redis."""

import pytest
from cluster_fixtures import one_slot_scripts, redis_url
from same_tests import borrowed

__all__ = ["one_slot_scripts", "redis_url"]

pytestmark = pytest.mark.long

# These count messages in the store's own Redis, or read it without the store.
ELSEWHERE = (
    "test_ready_runs_are_left_in_a_long_queue",
    "test_runs_left_in_a_queue_that_is_lost_come_back_at_once",
)
globals().update(borrowed("test_rescuer", without=ELSEWHERE))
