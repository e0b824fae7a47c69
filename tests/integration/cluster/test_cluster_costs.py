"""The ledger of model calls on a real Redis Cluster: tests for one Redis."""

from support.documents.same_tests import borrowed
from support.servers.cluster_fixtures import one_slot_scripts, redis_url

__all__ = ["one_slot_scripts", "redis_url"]

# Slow, or about one shard: the same on one Redis.
ELSEWHERE = (
    "test_sums_are_exact_for_any_number_of_calls",
    "test_the_sums_stay_when_the_runs_are_gone",
    "test_too_many_different_calls_lose_their_batch_and_no_cent",
    "test_a_cancelled_run_leaves_calls_without_a_price",
    "test_a_failed_call_costs_what_its_provider_has_said",
    "test_a_late_commit_of_a_journaled_answer_is_no_second_payment",
    "test_a_cached_answer_says_what_it_has_saved",
    "test_models_without_a_price_are_named",
    "test_bad_questions_name_field_and_fix",
)
globals().update(borrowed("test_costs", without=ELSEWHERE))
