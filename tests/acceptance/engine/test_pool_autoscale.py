"""`--autoscale` and the remote control of the pool's size, on a worker that does steps."""

import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from celery import Celery
from support.deadlines import wait_until
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Fleet
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply
from stepfleet.worker.testing.server import ModelServer

LONG = 60.0
Start = Callable[..., FleetWorker]
SOLVER = "plain"


class Gate:
    """A model that answers nothing before it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def rules(self, request: RequestRecord) -> Reply:
        assert self.opened.wait(LONG)
        return Reply(f"answer to {request.key}")


@pytest.fixture
def gate(model: ModelServer) -> Iterator[Gate]:
    gate = Gate()
    model.follow(gate.rules)
    yield gate
    gate.opened.set()


class Size(NamedTuple):
    """A worker's slots, how many are in use, and how many messages it takes ahead."""

    slots: int
    running: int
    prefetch: int


def size_of(app: Celery, worker: FleetWorker) -> Size:
    found = wait_until(
        lambda: app.control.inspect([worker.name], timeout=5.0).stats(), within=LONG, what="stats"
    )[worker.name]
    pool = found["pool"]
    return Size(pool["max-concurrency"], pool["running"], found["prefetch_count"])


def until_size(app: Celery, worker: FleetWorker, *wanted: int) -> None:
    wait_until(lambda: size_of(app, worker) == wanted, within=LONG, what=f"{Size(*wanted)}")


def check_answers(fleet: Fleet, model: ModelServer, run_ids: list[str]) -> None:
    """Each run has its own answer, and was paid once."""
    results = [fleet.runs.wait(run_id, timeout=LONG) for run_id in run_ids]
    assert [one.output for one in results] == [f"answer to q{n}" for n in range(len(run_ids))]
    assert sorted(one.key for one in model.requests) == sorted(f"q{n}" for n in range(len(run_ids)))


def test_autoscale_means_slots_and_a_busy_pool_grows_and_shrinks_without_losing_a_step(
    redis_url: str, start_worker: Start, model: ModelServer, gate: Gate
) -> None:
    worker = start_worker(options=("--autoscale", "6,0"), env={"AUTOSCALE_KEEPALIVE": "0.5"})
    with Celery(broker=redis_url, set_as_current=False) as app, Fleet(redis_url) as fleet:
        until_size(app, worker, 1, 0, 6)
        run_ids = [fleet.submit(SOLVER, f"q{n}") for n in range(12)]
        until_size(app, worker, 6, 6, 6)
        app.control.autoscale(9, 2, destination=[worker.name], reply=True, timeout=LONG)
        until_size(app, worker, 9, 9, 9)
        app.control.autoscale(3, 0, destination=[worker.name], reply=True, timeout=LONG)
        until_size(app, worker, 3, 9, 3)
        gate.opened.set()
        check_answers(fleet, model, run_ids)
        until_size(app, worker, 1, 0, 3)


def test_a_busy_pool_grows_and_shrinks_by_remote_control(
    redis_url: str, start_worker: Start, model: ModelServer, gate: Gate
) -> None:
    worker = start_worker(options=("--concurrency", "2"))
    with Celery(broker=redis_url, set_as_current=False) as app, Fleet(redis_url) as fleet:
        run_ids = [fleet.submit(SOLVER, f"q{n}") for n in range(8)]
        until_size(app, worker, 2, 2, 2)
        app.control.pool_grow(3, destination=[worker.name], reply=True, timeout=LONG)
        until_size(app, worker, 5, 5, 5)
        app.control.pool_shrink(4, destination=[worker.name], reply=True, timeout=LONG)
        until_size(app, worker, 1, 5, 1)
        gate.opened.set()
        check_answers(fleet, model, run_ids)
        until_size(app, worker, 1, 0, 1)
