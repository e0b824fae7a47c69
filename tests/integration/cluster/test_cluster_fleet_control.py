"""Cancel, pause, resume, retry on a real Redis Cluster: the tests for one Redis."""

import pytest
from support.documents.same_tests import borrowed
from support.servers.cluster_fixtures import one_slot_scripts, redis_url

__all__ = ["one_slot_scripts", "redis_url"]

pytestmark = pytest.mark.long

# These count messages in the store's own Redis, or read it without the store.
ELSEWHERE = ("test_workers_are_notified_at_once_of_the_cancel_of_a_held_run",)
globals().update(borrowed("test_fleet_control", without=ELSEWHERE))
