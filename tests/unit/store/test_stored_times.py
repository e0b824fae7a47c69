"""Times between Redis, whose scripts cut them to milliseconds, and Python."""

from datetime import timedelta

import pytest

from stepfleet.orchestrator.store.codec import EPOCH, in_milliseconds, milliseconds, moment


@pytest.mark.parametrize("micros", [0, 499, 500, 999])
def test_a_time_is_never_later_than_a_script_of_that_moment_stores(micros: int) -> None:
    at = EPOCH + timedelta(seconds=1_795_000_000, milliseconds=123, microseconds=micros)
    assert milliseconds(at) == 1_795_000_000_123
    assert in_milliseconds(at) <= at


@pytest.mark.parametrize("stored", [0, 1, 999, 1_795_000_000_001, 1_795_000_000_999])
def test_stored_times_come_back_exactly(stored: int) -> None:
    assert milliseconds(moment(stored)) == stored
