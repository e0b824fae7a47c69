"""The response cache on a real Redis Cluster: tests for one Redis, its script held to one slot."""

import inspect

from support.documents.same_tests import borrowed
from support.servers.cluster_fixtures import one_slot_scripts, redis_url

__all__ = ["one_slot_scripts", "redis_url"]

# What steps make of an answer is no other there; entries, their statistics and dropping are.
TAKEN = (
    "test_an_entry_is_read_until_its_time_is_over_and_leaves_the_statistics",
    "test_one_entry_one_model_or_all_are_dropped",
    "test_what_would_expire_next_makes_room_and_the_total_stays_below_its_bound",
    "test_the_second_of_two_equal_runs_is_answered_without_calls",
    "test_reads_of_many_steps_travel_together_and_find_the_same",
)
HELD = borrowed("test_response_cache")
OTHERS = [
    name
    for name, value in HELD.items()
    if name.startswith("test_") and inspect.isfunction(value) and name not in TAKEN
]
globals().update(borrowed("test_response_cache", without=OTHERS))
