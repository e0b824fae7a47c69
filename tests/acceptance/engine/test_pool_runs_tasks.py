"""The asyncio pool under a real worker: what tasks see, return and report."""

from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import TimeLimitExceeded
from support.deadlines import wait_until
from support.servers.redis_servers import RedisServer
from support.workers.toy_worker import Events, ToyWorker, client_app, until_heard

LONG = 60.0
Send = Callable[..., object]


@pytest.fixture(scope="module")
def broker(redis_server: RedisServer) -> str:
    redis_server.flush()
    return str(redis_server.url)


@pytest.fixture(scope="module")
def app(broker: str) -> Iterator[Celery]:
    with client_app(broker, broker) as app:
        yield app


@pytest.fixture(scope="module")
def worker(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyWorker]:
    worker = ToyWorker(tmp_path_factory.mktemp("worker"), broker, broker)
    try:
        yield worker.start()
    finally:
        worker.end()


@pytest.fixture(scope="module")
def events(app: Celery, worker: ToyWorker) -> Iterator[Events]:
    with Events(app).listening() as events:
        yield events


def pool_of(app: Celery, worker: ToyWorker) -> dict[str, Any]:
    return dict(app.control.inspect([worker.name], timeout=LONG).stats()[worker.name]["pool"])


def test_a_thousand_tasks_wait_at_the_same_time(app: Celery, worker: ToyWorker) -> None:
    results = [app.send_task("toyapp.meet", ("crowd", 1000)) for _ in range(1000)]
    assert sorted(r.get(timeout=60) for r in results) == list(range(1000))


def test_a_result_reaches_the_backend_and_the_monitor(
    app: Celery, worker: ToyWorker, events: Events
) -> None:
    result = app.send_task("toyapp.add", (2, 3))
    assert result.get(timeout=LONG) == 5
    wait_until(
        lambda: events.of(result.id)[-1:] == ["task-succeeded"], within=LONG, what="the last event"
    )
    assert events.of(result.id) == ["task-received", "task-started", "task-succeeded"]


def test_an_exception_of_a_coroutine_fails_the_task(
    app: Celery, worker: ToyWorker, events: Events
) -> None:
    result = app.send_task("toyapp.fail", ("out of cheese",))
    with pytest.raises(ValueError, match="out of cheese"):
        result.get(timeout=LONG)
    wait_until(
        lambda: events.of(result.id)[-1:] == ["task-failed"], within=LONG, what="the failure event"
    )
    assert "explode" in str(result.traceback)


def test_an_exception_that_cannot_be_pickled_fails_the_task_alone(
    app: Celery, worker: ToyWorker
) -> None:
    result = app.send_task("toyapp.fail_unpicklable")
    with pytest.raises(Exception, match="holds a lock"):
        result.get(timeout=LONG)
    assert app.send_task("toyapp.add", (1, 1)).get(timeout=LONG) == 2


def test_a_retried_task_is_reported_as_retried_and_runs_again(
    app: Celery, worker: ToyWorker, events: Events
) -> None:
    result = app.send_task("toyapp.retry_once")
    assert result.get(timeout=LONG) == 1
    wait_until(
        lambda: events.of(result.id)[-1:] == ["task-succeeded"], within=LONG, what="the last event"
    )
    assert "task-retried" in events.of(result.id)


def test_a_retry_raised_by_hand_is_reported_as_retried(
    app: Celery, worker: ToyWorker, events: Events
) -> None:
    result = app.send_task("toyapp.raise_retry")
    wait_until(
        lambda: events.of(result.id)[-1:] == ["task-retried"], within=LONG, what="the retry event"
    )
    wait_until(lambda: result.state == "RETRY", within=LONG, what="the state")
    assert "task-failed" not in events.of(result.id)


def test_an_ignored_task_is_acknowledged_without_a_result(
    app: Celery, worker: ToyWorker, events: Events
) -> None:
    result = app.send_task("toyapp.ignore")
    wait_until(lambda: "task-started" in events.of(result.id), within=LONG, what="its start")
    wait_until(lambda: not worker.notes.hlen("unacked"), within=LONG, what="its acknowledgement")
    assert result.state == "PENDING"


def test_a_rejected_task_is_reported_as_rejected(
    app: Celery, worker: ToyWorker, events: Events
) -> None:
    result = app.send_task("toyapp.reject")
    wait_until(
        lambda: "task-rejected" in events.of(result.id), within=LONG, what="the rejection event"
    )
    assert "task-succeeded" not in events.of(result.id)


def test_a_task_that_leaves_the_process_fails_and_the_worker_stays(
    app: Celery, worker: ToyWorker
) -> None:
    result = app.send_task("toyapp.leave")
    with pytest.raises(Exception, match="exited prematurely"):
        result.get(timeout=LONG)
    assert app.send_task("toyapp.add", (1, 1)).get(timeout=LONG) == 2


def test_a_coroutine_that_cancels_itself_fails_its_task(app: Celery, worker: ToyWorker) -> None:
    result = app.send_task("toyapp.cancel_itself")
    with pytest.raises(Exception, match="cancelled itself"):
        result.get(timeout=LONG)


def test_a_body_that_never_waits_runs_and_blocks_the_loop(app: Celery, worker: ToyWorker) -> None:
    def is_seen() -> bool:
        """Block the loop once more: the time before may have been between two probes."""
        assert app.send_task("toyapp.block", (0.6,)).get(timeout=LONG) == 0.6
        worst: float = pool_of(app, worker)["worst-loop-lag-seconds"]
        return worst > 0.05

    wait_until(is_seen, within=LONG, what="a probe that came late")


def test_every_place_of_a_task_sees_its_own_request_while_others_interleave(
    app: Celery, worker: ToyWorker
) -> None:
    parties = 20
    sent = [app.send_task("toyapp.identify", (f"c{i}", parties)) for i in range(parties)]
    for i, result in enumerate(sent):
        own, name = result.id, f"c{i}"
        assert result.get(timeout=LONG) == [
            *[own, own, name],  # the body
            *[own, name],  # the coroutine
            *[own, own, name] * 2,  # its child tasks
            *[own, name],  # its thread
            *[own, f"{name}!"],  # the body again: what the coroutine set is there
        ]


def test_a_thread_of_a_task_waits_on_the_pools_loop(app: Celery, worker: ToyWorker) -> None:
    assert app.send_task("toyapp.sum_in_a_thread").get(timeout=LONG) == 2


def test_collaborators_are_made_once_per_loop(app: Celery, worker: ToyWorker) -> None:
    assert app.send_task("toyapp.one_client_per_loop").get(timeout=LONG) == [True, worker.pid]


def test_await_inside_a_coroutine_says_what_to_do(app: Celery, worker: ToyWorker) -> None:
    with pytest.raises(RuntimeError, match="use `await` there"):
        app.send_task("toyapp.await_in_a_coroutine").get(timeout=LONG)


def test_a_countdown_runs_after_its_time_and_is_listed_as_scheduled(
    app: Celery, worker: ToyWorker
) -> None:
    until_heard(app, worker)
    later = app.send_task("toyapp.add", (4, 4), countdown=600)

    def scheduled() -> list[str]:
        told = app.control.inspect([worker.name], timeout=LONG).scheduled()
        return [entry["request"]["id"] for entry in told[worker.name]]

    wait_until(scheduled, within=LONG, what="the schedule")
    assert scheduled() == [later.id]
    began = monotonic()
    assert app.send_task("toyapp.add", (4, 5), countdown=2).get(timeout=LONG) == 9
    assert monotonic() - began > 1.5
    assert not later.ready()
    later.revoke()


def test_the_soft_limit_is_raised_in_the_body_which_may_clean_up(
    app: Celery, worker: ToyWorker, events: Events
) -> None:
    result = app.send_task("toyapp.tidy", ("soft",), soft_time_limit=0.3, time_limit=10)
    assert result.get(timeout=LONG) == "tidied after (0.3,)"
    assert "soft" in worker.notes.lrange("tidied", 0, -1)
    said = "Soft time limit (0.3s) exceeded for toyapp.tidy"
    wait_until(lambda: said in worker.log, within=LONG, what="the log")


def test_the_hard_limit_fails_the_task_as_celery_does(
    app: Celery, worker: ToyWorker, events: Events
) -> None:
    result = app.send_task("toyapp.gate", ("hard",), time_limit=2.0)
    with pytest.raises(TimeLimitExceeded):
        result.get(timeout=LONG)
    wait_until(
        lambda: events.of(result.id)[-1:] == ["task-failed"], within=LONG, what="the failure event"
    )
    wait_until(
        lambda: "hard" in worker.notes.lrange("cancelled", 0, -1),
        within=LONG,
        what="the cancellation",
    )
    said = "Hard time limit (2.0s) exceeded for toyapp.gate"
    wait_until(lambda: said in worker.log, within=LONG, what="the log")


def test_a_task_that_swallows_its_cancellation_is_abandoned_and_stays_failed(
    app: Celery, worker: ToyWorker
) -> None:
    result = app.send_task("toyapp.stubborn", ("mule",), time_limit=2.0)
    with pytest.raises(TimeLimitExceeded):
        result.get(timeout=LONG)

    def has_abandoned() -> bool:
        return bool(pool_of(app, worker)["abandoned"])

    wait_until(has_abandoned, within=LONG, what="the abandoned task")
    wait_until(lambda: pool_of(app, worker)["running"] == 0, within=LONG, what="a free slot")
    worker.open("mule")
    assert app.send_task("toyapp.add", (1, 1)).get(timeout=LONG) == 2
    assert result.state == "FAILURE"
    assert "mule" not in worker.notes.lrange("finished", 0, -1)
