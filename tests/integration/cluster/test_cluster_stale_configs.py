"""Forgetting configurations on a real Redis Cluster: the tests for one Redis."""

import pytest
from support.documents.same_tests import borrowed
from support.servers.cluster_fixtures import one_slot_scripts, redis_url

__all__ = ["one_slot_scripts", "redis_url"]

pytestmark = pytest.mark.long

# It renames a key of a run, which would leave its slot.
ELSEWHERE = ("test_runs_of_any_number_and_name_are_found",)
globals().update(borrowed("test_stale_configs", without=ELSEWHERE))
