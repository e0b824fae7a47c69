"""What the pool refuses before anything starts."""

from types import SimpleNamespace

import pytest
from celery.concurrency.solo import TaskPool
from celery.exceptions import ImproperlyConfigured

from stepfleet.worker.engine.pool import Pool, check_pool, refuse_greenlet_pools

GEVENT = type("TaskPool", (), {"__module__": "celery.concurrency.gevent"})


@pytest.mark.parametrize(
    "pool", ["gevent", "eventlet", "celery.concurrency.gevent:TaskPool", GEVENT]
)
def test_greenlet_pools_are_refused_with_the_reason(pool: object) -> None:
    with pytest.raises(ImproperlyConfigured, match="runs tasks twice"):
        check_pool(pool)


@pytest.mark.parametrize(
    "pool",
    ["", "prefork", "threads", "solo", "stepfleet.worker.engine.pool:Pool", TaskPool, Pool, None],
)
def test_other_pools_pass(pool: object) -> None:
    check_pool(pool)


def test_the_receiver_ends_the_start_of_the_worker() -> None:
    with pytest.raises(SystemExit, match="The gevent pool is not supported"):
        refuse_greenlet_pools(sender=SimpleNamespace(pool_cls="gevent"))


def test_the_receiver_lets_other_workers_start() -> None:
    refuse_greenlet_pools(sender=SimpleNamespace(pool_cls=Pool))
