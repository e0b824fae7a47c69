import pytest

from stepfleet.orchestrator import ConfigurationError
from stepfleet.orchestrator.cli.workers import THREADS, slots_of


def test_only_the_asyncio_pool_takes_its_slots_from_the_settings() -> None:
    assert slots_of("asyncio", None) is None
    assert slots_of("threads", None) == THREADS
    assert slots_of("solo", None) == 1


def test_slots_that_are_asked_for_win() -> None:
    assert slots_of("prefork", 3) == 3
    assert slots_of("asyncio", 3) == 3


@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
def test_greenlet_pools_are_refused_with_the_reason(pool: str) -> None:
    with pytest.raises(ConfigurationError, match="never takes back"):
        slots_of(pool, None)


def test_an_unknown_pool_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigurationError, match="asyncio, prefork, threads, solo"):
        slots_of("fibers", None)
