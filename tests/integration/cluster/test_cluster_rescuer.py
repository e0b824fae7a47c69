"""The rescuer on a real Redis Cluster: the tests for one Redis."""

import pytest
from support.documents.same_tests import borrowed
from support.servers.cluster_fixtures import one_slot_scripts, redis_url

__all__ = ["one_slot_scripts", "redis_url"]

pytestmark = pytest.mark.long

# These count messages in the store's own Redis, or read it without the store.
ELSEWHERE = (
    "test_ready_runs_are_left_in_a_long_queue",
    "test_runs_left_in_a_queue_that_is_lost_come_back_at_once",
    "test_a_hint_that_a_long_queue_lost_comes_back_though_it_stays_long",
    "test_who_watches_looks_in_its_turn_only",
    "test_few_of_those_that_wait_in_a_long_queue_are_published_again",
)
globals().update(borrowed("test_rescuer", without=ELSEWHERE))
