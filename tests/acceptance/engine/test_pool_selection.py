"""How the pool is chosen, what it refuses, and that other pools run the same tasks."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from support.deadlines import wait_until
from support.workers.toy_worker import ToyWorker, client_app, until_heard

LONG = 60.0
Make = Callable[..., ToyWorker]


@pytest.fixture
def app(redis_url: str) -> Iterator[Celery]:
    with client_app(redis_url, redis_url) as app:
        yield app


@pytest.fixture
def make(redis_url: str, tmp_path: Path) -> Iterator[Make]:
    workers: list[ToyWorker] = []

    def make(**arguments: Any) -> ToyWorker:
        workers.append(ToyWorker(tmp_path, redis_url, redis_url, **arguments))
        return workers[-1]

    yield make
    for worker in workers:
        worker.end()


def pool_of(app: Celery, worker: ToyWorker) -> dict[str, object]:
    until_heard(app, worker)
    return dict(app.control.inspect([worker.name], timeout=LONG).stats()[worker.name]["pool"])


def test_the_setting_selects_the_pool_and_a_thousand_slots(app: Celery, make: Make) -> None:
    worker = make().start()
    pool = pool_of(app, worker)
    assert pool["implementation"] == "stepfleet.worker.engine.pool:Pool"
    assert pool["max-concurrency"] == 1000


def test_the_option_custom_selects_the_pool(app: Celery, make: Make) -> None:
    worker = make(
        options=("-P", "custom", "-c", "7"),
        settings={"worker_pool": "prefork"},
        env={"CELERY_CUSTOM_WORKER_POOL": "stepfleet.worker.engine.pool:Pool"},
    ).start()
    pool = pool_of(app, worker)
    assert pool["implementation"] == "stepfleet.worker.engine.pool:Pool"
    assert pool["max-concurrency"] == 7
    assert app.send_task("toyapp.add", (1, 2)).get(timeout=LONG) == 3


def test_max_tasks_per_child_is_ignored_with_a_warning(app: Celery, make: Make) -> None:
    worker = make(options=("--max-tasks-per-child", "1")).start()
    assert "worker_max_tasks_per_child has no effect" in worker.log
    assert [app.send_task("toyapp.add", (i, 1)).get(timeout=LONG) for i in range(3)] == [1, 2, 3]


def test_gevent_is_refused_with_the_reason(make: Make) -> None:
    worker = make(options=("-P", "gevent")).launch()
    assert worker.wait(within=LONG) != 0
    assert "The gevent pool is not supported" in worker.log
    assert "runs tasks twice" in worker.log


def test_slots_beyond_the_limit_wait_under_a_blocking_transport(make: Make, tmp_path: Path) -> None:
    """A transport without an event loop (kombu's filesystem one) drives the same pool."""
    folder = tmp_path / "broker"
    folder.mkdir()
    options = {"data_folder_in": str(folder), "data_folder_out": str(folder),
               "control_folder": str(tmp_path / "control")}  # fmt: skip
    worker = make(
        options=("-c", "2", "--without-heartbeat"),
        settings={"broker_transport_options": options, "worker_prefetch_multiplier": 4},
        env={"TOY_BROKER": "filesystem://"},
    ).start()
    other = Celery("other", broker="filesystem://", set_as_current=False)
    other.conf.update(task_default_queue="toy", broker_transport_options=options)
    for i in range(4):
        other.send_task("toyapp.gate", (f"t{i}",))
    wait_until(lambda: worker.notes.llen("started") == 2, within=LONG, what="two running tasks")
    for i in range(4):
        worker.open(f"t{i}")
    wait_until(lambda: worker.notes.llen("finished") == 4, within=LONG, what="four results")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    other.close()


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_stock_pools_run_the_same_tasks(app: Celery, make: Make, pool: object) -> None:
    make(options=("-P", pool, "-c", "2"), settings={"worker_pool": ""}).start()
    assert app.send_task("toyapp.sum_in_a_thread").get(timeout=LONG) == 2
    first = app.send_task("toyapp.one_client_per_loop").get(timeout=LONG)
    assert first[0] is True
    with pytest.raises(ValueError, match="out of cheese"):
        app.send_task("toyapp.fail", ("out of cheese",)).get(timeout=LONG)
    with pytest.raises(Exception, match="cancelled itself"):
        app.send_task("toyapp.cancel_itself").get(timeout=LONG)


def test_a_soft_limit_under_prefork_cancels_the_coroutine_and_reaches_the_body(
    app: Celery, make: Make
) -> None:
    worker = make(options=("-P", "prefork", "-c", "1"), settings={"worker_pool": ""}).start()
    tidied = app.send_task("toyapp.tidy", ("soft",), soft_time_limit=1, time_limit=20)
    assert tidied.get(timeout=LONG).startswith("tidied after")
    cut = app.send_task("toyapp.gate", ("cut",), soft_time_limit=1, time_limit=20)
    with pytest.raises(SoftTimeLimitExceeded):
        cut.get(timeout=LONG)
    wait_until(
        lambda: "cut" in worker.notes.lrange("cancelled", 0, -1), within=LONG, what=worker.log
    )
