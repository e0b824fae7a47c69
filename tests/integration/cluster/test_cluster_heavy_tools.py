"""Tool calls as tasks on a real Redis Cluster: the tests for one Redis."""

import pytest
from support.documents.same_tests import borrowed
from support.servers.cluster_fixtures import one_slot_scripts, redis_url

__all__ = ["one_slot_scripts", "redis_url"]

pytestmark = pytest.mark.long

# These count messages in the store's own Redis, or read it without the store.
ELSEWHERE = {
    "test_heavy_tools": (
        "test_a_step_parks_without_a_lease_and_its_call_waits_in_the_tools_queue",
        "test_where_store_and_broker_differ_tasks_are_published_behind_the_script",
    ),
    "test_heavy_tools_lost": (
        "test_a_reply_that_was_lost_behind_a_delivery_is_known_again",
        "test_a_lost_task_is_dispatched_again_and_a_held_one_is_left_alone",
    ),
    "test_heavy_tools_control": (
        "test_a_paused_run_starts_no_call_keeps_results_and_goes_on_when_it_is_resumed",
    ),
}
for module, without in ELSEWHERE.items():
    globals().update(borrowed(module, without=without))
