"""Which requests the pool runs without Celery's tracer, and what the tracer gets otherwise."""

import asyncio
import functools
import gc
import json
import weakref
from collections.abc import Coroutine
from typing import Any

import pytest
from billiard.einfo import ExceptionInfo
from celery import Celery, current_task, signals
from celery._state import _task_stack
from celery.app import trace
from celery.app.trace import trace_task_ret
from celery.exceptions import WorkerLostError
from celery.worker.request import Request
from kombu.message import Message

from stepfleet.worker.engine.bridge import await_
from stepfleet.worker.engine.loop_thread import new_event_loop
from stepfleet.worker.engine.messages import Headers, Inadmissible
from stepfleet.worker.engine.pool.direct import DirectCall, WaitingTask, direct_call
from stepfleet.worker.engine.pool.job import Callbacks, Limits, PoolJob, follow_jobs

LONG = 60.0


class Doubling(WaitingTask):
    """Doubles a number; refuses texts, fails for numbers below zero and for twice 13."""

    began = 0

    def begin(self, args: Any, kwargs: Any, message: Headers) -> Coroutine[Any, Any, Any]:
        del kwargs, message
        if isinstance(args[0], str):
            raise Inadmissible(args[0])
        return self.doubled(args[0])

    async def doubled(self, number: int) -> int:
        self.began += 1
        if number > 1000:
            await asyncio.Event().wait()
        await asyncio.sleep(0)  # a body that never waits is over at once
        if number < 0:
            raise ValueError(number)
        return 2 * number

    def end(self, answer: Any) -> str:
        if answer == 26:
            raise LookupError(answer)
        return f"it is {answer}"


@pytest.fixture
def app() -> Celery:
    app = Celery("direct", set_as_current=False, broker="memory://")

    def double(self: Doubling, *args: Any) -> str:
        return self.end(await_(self.begin(args, {}, self.request)))

    options = {"base": Doubling, "bind": True, "name": "double", "ignore_result": True}
    app.task(shared=False, **options)(double)
    app.finalize()
    follow_jobs(app)
    return app


def request(app: Celery, number: Any, embed: Any = None, **headers: Any) -> Request:
    task = app.tasks["double"]
    body = json.dumps([[number], {}, embed]).encode()
    told = {"id": "one", "task": "double", "argsrepr": f"[{number}]", **headers}
    message = Message(  # type: ignore[no-untyped-call]
        body,
        content_type="application/json",
        content_encoding="utf-8",
        headers=told,
        accept={"application/json"},
    )
    return Request(message, app=app, task=task, hostname="here")


class Owner:
    """Takes the outcome of one job."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    def finished(self, job: PoolJob, outcome: object) -> None:
        del job
        self.ended.set_result(outcome)

    def limit_reached(self, job: PoolJob, *, soft: bool) -> None:
        del job, soft

    def is_revoked(self, job: PoolJob) -> bool:
        raise AssertionError(job)

    def abandoned(self, job: PoolJob) -> None:
        raise AssertionError(job)


def job_of(app: Celery, made: Request, limits: Limits, owner: Owner) -> PoolJob:
    def target() -> object:
        content = (made.body, made.content_type, made.content_encoding)
        return trace_task_ret("double", made.id, made.request_dict, *content, app=app)

    callbacks = Callbacks(*[lambda *_: None] * 4)
    loop = asyncio.get_running_loop()
    return PoolJob(target, callbacks, limits, owner, loop, direct_call(made))


async def outcome_of(app: Celery, made: Request, limits: Limits | None = None) -> Any:
    owner = Owner()
    job_of(app, made, limits or Limits(None, None), owner).begin()
    return await asyncio.wait_for(owner.ended, LONG)


def run(app: Celery, made: Request, limits: Limits | None = None) -> Any:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(outcome_of(app, made, limits))


@pytest.mark.parametrize(
    ("embed", "headers"),
    [
        ({"callbacks": [{"task": "double", "args": [1]}]}, {}),
        ({"chain": [{"task": "double", "args": [1]}]}, {}),
        ({"chord": {"task": "double"}}, {}),
        ({"errbacks": [{"task": "double", "args": [1]}]}, {}),
        (["no options"], {}),
        (None, {"ignore_result": False}),
    ],
)
def test_messages_that_ask_for_more_go_celerys_way(app: Celery, embed: Any, headers: Any) -> None:
    assert direct_call(request(app, 1, embed, **headers)) is None


@pytest.mark.parametrize("embed", [None, {}, {"callbacks": None, "chord": None}])
def test_plain_messages_are_run_directly(app: Celery, embed: Any) -> None:
    assert isinstance(direct_call(request(app, 1, embed)), DirectCall)


@pytest.mark.parametrize("hook", ["before_start", "on_success", "after_return"])
def test_a_task_with_hooks_goes_celerys_way(app: Celery, hook: str) -> None:
    setattr(type(app.tasks["double"]), hook, lambda *_: None)
    assert direct_call(request(app, 1)) is None


@pytest.mark.parametrize(
    "signal", [signals.task_prerun, signals.task_postrun, signals.task_success]
)
def test_somebody_who_listens_to_the_tracer_is_told(app: Celery, signal: Any) -> None:
    heard: list[Any] = []

    def receive(sender: Any = None, **_: Any) -> None:
        heard.append((sender.name, sender.request.id))

    signal.connect(receive)
    try:
        failed, shown, _ = run(app, request(app, 4))
    finally:
        signal.disconnect(receive)
    assert (failed, shown) == (0, "'it is 8'")
    assert heard == [("double", "one")]


def test_a_receiver_of_ours_is_told_without_the_tracer(app: Celery) -> None:
    heard: list[Any] = []

    def receive(sender: Any = None, task_id: Any = None, args: Any = None, **_: Any) -> None:
        heard.append((sender.name, sender.request.id, task_id, args))

    signals.task_prerun.connect(receive, dispatch_uid="stepfleet-test")
    try:
        failed, shown, _ = run(app, request(app, 4))
    finally:
        signals.task_prerun.disconnect(receive, dispatch_uid="stepfleet-test")
    assert (failed, shown) == (0, "'it is 8'")
    assert heard == [("double", "one", "one", [4])]


@pytest.mark.parametrize("place", ["build_tracer", "run", "__call__"])
def test_instruments_in_the_place_of_celerys_functions_are_called(
    app: Celery, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sentry's, for one, wraps all three."""
    on: Any = trace if place == "build_tracer" else app.tasks["double"]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError((args, kwargs))

    monkeypatch.setattr(on, place, functools.wraps(getattr(on, place))(wrapped), raising=False)
    assert direct_call(request(app, 1)) is None


def test_a_coroutine_and_its_threads_know_their_task(app: Celery) -> None:
    seen: list[Any] = []

    def look() -> None:
        seen.append((current_task.name, current_task.request.id, current_task.request.args))

    async def looked(self: Doubling, number: int) -> int:
        look()
        await asyncio.to_thread(look)
        return number

    type(app.tasks["double"]).doubled = looked
    run(app, request(app, 4))
    assert seen == [("double", "one", [4])] * 2
    assert not current_task


def test_what_a_task_leaves_on_celerys_stack_ends_with_it(app: Celery) -> None:
    async def careless(self: Doubling, number: int) -> int:
        _task_stack.push(self)
        return number

    type(app.tasks["double"]).doubled = careless
    before = dict(_task_stack._local)
    run(app, request(app, 4))
    assert dict(_task_stack._local) == before


def test_a_success_is_reported_like_the_tracers(app: Celery) -> None:
    failed, shown, runtime = run(app, request(app, 4))
    assert (failed, shown) == (0, "'it is 8'")
    assert 0 <= runtime < LONG


@pytest.mark.parametrize(
    ("number", "error"), [(-1, ValueError(-1)), (13, LookupError(26)), ("no", Inadmissible("no"))]
)
def test_the_tracer_gets_what_failed_and_nothing_runs_twice(
    app: Celery, number: Any, error: Exception
) -> None:
    heard: list[Any] = []

    def receive(exception: Any = None, task_id: Any = None, **_: Any) -> None:
        heard.append((repr(exception), task_id))

    signals.task_failure.connect(receive)
    try:
        failed, info, _ = run(app, request(app, number))
    finally:
        signals.task_failure.disconnect(receive)
    assert failed == 1
    assert isinstance(info, ExceptionInfo)
    assert repr(error) in (repr(info.exception), repr(getattr(info.exception, "exc", None)))
    assert heard == [(repr(error), "one")]
    assert app.tasks["double"].began == (0 if number == "no" else 1)


def test_the_soft_limit_is_raised_in_the_body(app: Celery) -> None:
    failed, info, _ = run(app, request(app, 2000), Limits(0.01, None))
    assert failed == 1
    assert "SoftTimeLimitExceeded" in repr(info.exception)


def test_the_hard_limit_ends_the_coroutine(app: Celery) -> None:
    outcome = run(app, request(app, 2000), Limits(None, 0.01))
    assert outcome.type is WorkerLostError


def test_a_job_that_has_succeeded_goes_without_the_garbage_collector(app: Celery) -> None:
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            assert runner.run(gone_after_its_end(app))
    finally:
        gc.enable()


async def gone_after_its_end(app: Celery) -> bool:
    owner = Owner()
    made = request(app, 4)
    job = job_of(app, made, Limits(LONG, LONG), owner)
    job.begin()
    known = [weakref.ref(job), weakref.ref(made)]
    del job, made
    await asyncio.wait_for(owner.ended, LONG)
    del owner
    await asyncio.sleep(0)  # the task itself ends after its report
    await asyncio.sleep(0)
    return [one() for one in known] == [None, None]
