"""The asyncio pool under Celery's remote control: revoke, inspect, limits, grow and shrink."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError
from support.deadlines import wait_until
from support.workers.toy_worker import Events, ToyWorker, client_app, until_heard

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


def ask(app: Celery, worker: ToyWorker, what: str) -> Any:
    answer = getattr(app.control.inspect([worker.name], timeout=LONG), what)()
    assert answer is not None, f"{worker.name} did not answer {what}"
    return json.loads(json.dumps(answer[worker.name]))


def until_pool(app: Celery, worker: ToyWorker, **wanted: int) -> None:
    """Wait for these numbers: a result is there before its task has left the pool."""

    def has_come() -> bool:
        return bool(ask(app, worker, "stats")["pool"].items() >= wanted.items())

    wait_until(has_come, within=LONG, what=str(wanted))


def test_inspect_tells_active_reserved_registered_and_stats(app: Celery, start: Start) -> None:
    worker = start(options=("-c", "1"), settings={"worker_prefetch_multiplier": 3})
    running = app.send_task("toyapp.gate", ("first",))
    wait_until(lambda: worker.started("first"), within=LONG, what="the first task")
    waiting = app.send_task("toyapp.gate", ("second",))
    reserved = wait_until(lambda: ask(app, worker, "reserved"), within=LONG, what="a reserved task")
    assert [r["id"] for r in reserved] == [waiting.id]
    assert [r["id"] for r in ask(app, worker, "active")] == [running.id]
    assert "toyapp.gate" in ask(app, worker, "registered")
    assert ask(app, worker, "ping") == {"ok": "pong"}
    until_pool(app, worker, running=1, waiting=1)
    pool = ask(app, worker, "stats")["pool"]
    assert pool["max-concurrency"] == 1
    assert pool["processes"] == [worker.pid]


def test_a_task_revoked_before_its_start_never_starts(app: Celery, start: Start) -> None:
    worker = start(options=("-c", "1"), settings={"worker_prefetch_multiplier": 3})
    app.send_task("toyapp.gate", ("first",))
    wait_until(lambda: worker.started("first"), within=LONG, what="the first task")
    revoked = app.send_task("toyapp.gate", ("second",))
    wait_until(lambda: ask(app, worker, "reserved"), within=LONG, what="a reserved task")
    app.control.revoke(revoked.id, destination=[worker.name], reply=True, timeout=LONG)
    last = app.send_task("toyapp.add", (1, 2))
    worker.open("first")
    assert last.get(timeout=LONG) == 3
    with pytest.raises(TaskRevokedError):
        revoked.get(timeout=LONG)
    assert not worker.started("second")


def test_revoke_with_terminate_cancels_the_coroutine(app: Celery, start: Start) -> None:
    worker = start()
    with Events(app).listening() as events:
        result = app.send_task("toyapp.gate", ("doomed",))
        wait_until(lambda: worker.started("doomed"), within=LONG, what="its start")
        here = [worker.name]
        app.control.revoke(result.id, terminate=True, destination=here, reply=True, timeout=LONG)
        wait_until(
            lambda: "doomed" in worker.notes.lrange("cancelled", 0, -1),
            within=LONG,
            what="its cancellation",
        )
        wait_until(lambda: "task-revoked" in events.of(result.id), within=LONG, what="the event")
    # Celery tells of it before it stores it.
    wait_until(lambda: result.state == "REVOKED", within=LONG, what="the state")
    assert app.send_task("toyapp.add", (1, 1)).get(timeout=LONG) == 2
    until_pool(app, worker, running=0)
    assert result.state == "REVOKED"


def test_the_worker_wide_time_limit_holds_for_every_task(app: Celery, start: Start) -> None:
    worker = start(options=("--soft-time-limit", "0.3", "--time-limit", "20"))
    assert app.send_task("toyapp.tidy", ("wide",)).get(timeout=LONG) == "tidied after (0.3,)"
    assert ask(app, worker, "stats")["pool"]["timeouts"] == [0.3, 20]


def test_grow_and_shrink_change_the_slots_and_the_prefetch(app: Celery, start: Start) -> None:
    worker = start(options=("-c", "2"))
    held = [app.send_task("toyapp.gate", (f"g{i}",)) for i in range(4)]
    wait_until(lambda: worker.notes.llen("started") == 2, within=LONG, what="two running tasks")
    app.control.pool_grow(2, destination=[worker.name], reply=True, timeout=LONG)
    wait_until(lambda: worker.notes.llen("started") == 4, within=LONG, what="four running tasks")
    app.control.pool_shrink(3, destination=[worker.name], reply=True, timeout=LONG)
    stats = ask(app, worker, "stats")
    assert (stats["pool"]["max-concurrency"], stats["prefetch_count"]) == (1, 1)
    more = [app.send_task("toyapp.gate", (f"m{i}",)) for i in range(2)]
    for i in range(4):
        worker.open(f"g{i}")
    for result in held:
        result.get(timeout=LONG)
    wait_until(lambda: worker.notes.llen("started") == 5, within=LONG, what="one more running task")
    until_pool(app, worker, running=1)
    refused = app.control.pool_shrink(1, destination=[worker.name], reply=True, timeout=LONG)
    assert "needs at least 1" in str(refused)
    worker.open("m0")
    worker.open("m1")
    for result in more:
        result.get(timeout=LONG)


def test_a_rate_limit_spreads_the_starts(app: Celery, start: Start) -> None:
    worker = start()
    until_heard(app, worker)
    app.control.rate_limit("toyapp.add", "2/s", destination=[worker.name], reply=True, timeout=LONG)
    with Events(app).listening() as events:
        sent = [app.send_task("toyapp.add", (i, 0)) for i in range(8)]
        assert [r.get(timeout=LONG) for r in sent] == list(range(8))
        starts = sorted(
            event["timestamp"]
            for event in wait_until(
                lambda: events.all("task-started", 8), within=LONG, what="eight starts"
            )
        )
    # 3.5 s between the first and the last, less what the first one was told late.
    assert starts[-1] - starts[0] > 1.0


def test_control_shutdown_ends_the_worker_warmly(app: Celery, start: Start) -> None:
    worker = start()
    result = app.send_task("toyapp.gate", ("last",))
    wait_until(lambda: worker.started("last"), within=LONG, what="its start")
    app.control.shutdown(destination=[worker.name])
    wait_until(lambda: "Got shutdown from remote" in worker.log, within=LONG, what="the shutdown")
    worker.open("last")
    assert worker.wait() == 0
    assert result.get(timeout=LONG) == "last"
