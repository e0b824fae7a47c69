"""What the pool refuses before anything starts."""

from types import SimpleNamespace

import pytest
from celery.concurrency.solo import TaskPool
from celery.exceptions import ImproperlyConfigured

from stepfleet.worker.engine.pool import Pool, check_pool, refuse_greenlet_pools

GEVENT = type("TaskPool", (), {"__module__": "celery.concurrency.gevent"})


def refusal_of(pool: object) -> str | None:
    try:
        check_pool(pool)
    except ImproperlyConfigured as error:
        return str(error)
    return None


def end_of_a_start_with(pool: object) -> str | None:
    try:
        refuse_greenlet_pools(sender=SimpleNamespace(pool_cls=pool))
    except SystemExit as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "pool", ["gevent", "eventlet", "celery.concurrency.gevent:TaskPool", GEVENT]
)
def test_greenlet_pools_are_refused_with_the_reason(pool: object) -> None:
    assert "runs tasks twice" in str(refusal_of(pool))


@pytest.mark.parametrize(
    "pool",
    ["", "prefork", "threads", "solo", "stepfleet.worker.engine.pool:Pool", TaskPool, Pool, None],
)
def test_other_pools_pass(pool: object) -> None:
    assert refusal_of(pool) is None


def test_the_receiver_ends_the_start_of_the_worker() -> None:
    assert "The gevent pool is not supported" in str(end_of_a_start_with("gevent"))


def test_the_receiver_lets_other_workers_start() -> None:
    assert end_of_a_start_with(Pool) is None
