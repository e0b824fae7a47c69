from hypothesis import given
from hypothesis import strategies as st

from stepfleet.orchestrator.protocol.verdict import LONGEST, backoff

jitters = st.floats(min_value=0, max_value=1)


@given(st.integers(1, 100_000), jitters)
def test_waits_grow_up_to_a_bound_and_never_vanish(failures: int, jitter: float) -> None:
    """ERR-22"""
    wait = backoff(failures, retry_after=None, jitter=jitter)
    assert 0.5 <= wait <= LONGEST
    assert backoff(failures + 1, retry_after=None, jitter=jitter) >= wait


@given(st.integers(1, 20), st.floats(min_value=0, max_value=3600), jitters)
def test_the_providers_wish_is_honoured(failures: int, wish: float, jitter: float) -> None:
    """ERR-22: never less than Retry-After."""
    assert backoff(failures, retry_after=wish, jitter=jitter) >= wish


def test_runs_that_failed_together_do_not_come_back_together() -> None:
    waits = {backoff(3, retry_after=10, jitter=jitter / 10) for jitter in range(10)}
    assert len(waits) == 10
