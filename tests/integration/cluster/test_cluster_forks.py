"""Forks on a real Redis Cluster: the tests for one Redis."""

import pytest
from support.documents.same_tests import borrowed
from support.servers.cluster_fixtures import one_slot_scripts, redis_url

__all__ = ["one_slot_scripts", "redis_url"]

pytestmark = pytest.mark.long

# These count messages in the store's own Redis, or read it without the store.
ELSEWHERE = ("test_a_fork_that_cannot_be_made_says_why_and_makes_nothing",)
globals().update(borrowed("test_forks", without=ELSEWHERE))
