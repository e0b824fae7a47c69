"""Claim, journal and commit on a real Redis Cluster: the tests for one Redis."""

import pytest
from support.documents.same_tests import borrowed
from support.servers.cluster_fixtures import one_slot_scripts, redis_url

__all__ = ["one_slot_scripts", "redis_url"]

pytestmark = pytest.mark.long

# These count messages in the store's own Redis, or read it without the store.
ELSEWHERE = (
    "test_a_new_run_is_queued_due_and_has_one_message",
    "test_creating_a_run_twice_changes_nothing",
    "test_a_commit_writes_log_counters_and_the_next_message_at_once",
    "test_a_run_that_stopped_has_no_further_message_and_leaves_the_index",
    "test_a_transient_failure_waits_outside_the_queue",
)
globals().update(borrowed("test_step_protocol", without=ELSEWHERE))
