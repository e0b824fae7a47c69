"""How a worker with the asyncio pool ends, and what that does to its tasks."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from support.deadlines import wait_until
from support.servers.redis_servers import RedisServer
from support.workers.toy_worker import ToyWorker, client_app

LONG = 60.0
Start = Callable[..., ToyWorker]


@pytest.fixture
def app(redis_url: str) -> Iterator[Celery]:
    with client_app(redis_url, redis_url) as app:
        yield app


@pytest.fixture
def start(redis_url: str, tmp_path: Path) -> Iterator[Start]:
    workers: list[ToyWorker] = []

    def start(**arguments: Any) -> ToyWorker:
        workers.append(ToyWorker(tmp_path, redis_url, redis_url, **arguments))
        return workers[-1].start()

    yield start
    for worker in workers:
        worker.end()


@pytest.mark.parametrize("task", ["toyapp.gate", "toyapp.late_gate"])
def test_sigterm_waits_for_the_tasks_that_run_and_gives_the_others_back(
    app: Celery, start: Start, task: str
) -> None:
    worker = start(options=("-c", "2"), settings={"worker_prefetch_multiplier": 4})
    sent = [app.send_task(task, (f"t{i}",)) for i in range(5)]
    wait_until(lambda: worker.notes.llen("started") == 2, within=LONG, what="two running tasks")
    worker.signal(signal.SIGTERM)
    wait_until(lambda: "running tasks to end" in worker.log, within=LONG, what="the warm shutdown")
    for i in range(5):
        worker.open(f"t{i}")
    assert worker.wait() == 0
    assert worker.notes.llen("finished") == 2
    assert worker.notes.llen("toy") == 3
    assert worker.notes.hlen("unacked") == 0
    start(name="w2")
    assert [r.get(timeout=LONG) for r in sent] == [f"t{i}" for i in range(5)]
    assert worker.notes.llen("started") == 5


def test_acknowledgements_go_out_while_a_warm_shutdown_waits_for_others(
    app: Celery, start: Start
) -> None:
    worker = start()
    for name in ("quick", "slow"):
        app.send_task("toyapp.late_gate", (name,))
    wait_until(lambda: worker.notes.llen("started") == 2, within=LONG, what="two running tasks")
    worker.signal(signal.SIGTERM)
    wait_until(lambda: "running tasks to end" in worker.log, within=LONG, what="the warm shutdown")
    worker.open("quick")
    wait_until(lambda: worker.notes.hlen("unacked") == 1, within=LONG, what="the acknowledgement")
    assert worker.exit_code is None
    worker.open("slow")
    assert worker.wait() == 0


def test_sigquit_ends_the_worker_at_once_and_late_tasks_run_again(
    app: Celery, start: Start
) -> None:
    worker = start()
    result = app.send_task("toyapp.late_gate", ("again",))
    wait_until(lambda: worker.started("again"), within=LONG, what="its start")
    worker.signal(signal.SIGQUIT)
    worker.wait()
    assert "again" in worker.notes.lrange("cancelled", 0, -1)
    worker.open("again")
    start(name="w2")
    assert result.get(timeout=LONG) == "again"


def test_sigquit_during_a_warm_shutdown_ends_it_at_once(app: Celery, start: Start) -> None:
    worker = start()
    app.send_task("toyapp.gate", ("endless",))
    wait_until(lambda: worker.started("endless"), within=LONG, what="its start")
    worker.signal(signal.SIGTERM)
    wait_until(lambda: "running tasks to end" in worker.log, within=LONG, what="the warm shutdown")
    worker.signal(signal.SIGQUIT)
    worker.wait(within=LONG)
    assert "endless" in worker.notes.lrange("cancelled", 0, -1)


def test_a_second_interrupt_ends_the_worker_at_once(app: Celery, start: Start) -> None:
    worker = start()
    app.send_task("toyapp.gate", ("endless",))
    wait_until(lambda: worker.started("endless"), within=LONG, what="its start")
    worker.signal(signal.SIGINT)
    wait_until(lambda: "running tasks to end" in worker.log, within=LONG, what="the warm shutdown")
    worker.signal(signal.SIGINT)
    worker.wait(within=LONG)
    assert "endless" in worker.notes.lrange("cancelled", 0, -1)


def test_a_cold_shutdown_is_not_held_up_by_a_task_that_swallows_its_cancellation(
    app: Celery, start: Start
) -> None:
    worker = start()
    app.send_task("toyapp.stubborn", ("mule",))
    wait_until(lambda: worker.started("mule"), within=LONG, what="its start")
    worker.signal(signal.SIGQUIT)
    assert worker.wait(within=LONG) == 0


def test_tasks_that_ran_across_a_lost_connection_still_report(
    app: Celery, start: Start, own_redis: Callable[..., RedisServer]
) -> None:
    broker = own_redis()
    worker = start(env={"TOY_BROKER": broker.url})
    with client_app(broker.url, str(app.conf.result_backend)) as other:
        result = other.send_task("toyapp.gate", ("survivor",))
        wait_until(lambda: worker.started("survivor"), within=LONG, what="its start")
        broker.restart()
        wait_until(lambda: worker.log.count("Connected to") > 1, within=LONG, what="a reconnect")
        worker.open("survivor")
        assert result.get(timeout=LONG) == "survivor"
        assert other.send_task("toyapp.add", (1, 1)).get(timeout=LONG) == 2
