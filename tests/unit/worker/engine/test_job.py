"""A job of the asyncio pool that is interrupted before its task has begun."""

import asyncio
import contextlib
import contextvars
import gc
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from stepfleet.worker.engine.bridge import await_
from stepfleet.worker.engine.loop_thread import new_event_loop
from stepfleet.worker.engine.pool.job import Callbacks, Limits, PoolJob

LONG = 60.0
REPORTS = Callbacks(*[lambda *_: None] * 4)


class Owner:
    """Notes what a pool would be told."""

    def __init__(self) -> None:
        self.outcomes: list[object] = []
        self.left = asyncio.Event()
        self.reached: list[bool] = []

    def finished(self, job: PoolJob, outcome: object) -> None:
        assert job.target is not None
        self.outcomes.append(outcome)
        self.left.set()

    def limit_reached(self, job: PoolJob, *, soft: bool) -> None:
        assert job.limits is not None
        self.reached.append(soft)

    def is_revoked(self, job: PoolJob) -> bool:
        return job.terminated_by is not None

    def abandoned(self, job: PoolJob) -> None:
        raise AssertionError(job)


def started(target: Callable[[], object], limits: Limits) -> tuple[PoolJob, Owner]:
    owner = Owner()
    loop = asyncio.get_running_loop()
    job = PoolJob(target, REPORTS, limits, owner, loop)
    loop.call_soon(job.begin)
    return job, owner


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    """The pool's own loop: uvloop, where there is one, looks at timers first."""
    with asyncio.Runner(loop_factory=new_event_loop) as opened:
        yield opened


def test_a_task_that_is_ended_before_its_first_step_gives_its_slot_back(
    runner: asyncio.Runner,
) -> None:
    runner.run(check_a_task_that_is_ended_before_its_first_step())


async def check_a_task_that_is_ended_before_its_first_step() -> None:
    ran: list[str] = []
    job, owner = started(lambda: ran.append("ran"), Limits(None, None))
    job.terminate()
    await asyncio.wait_for(owner.left.wait(), LONG)
    assert owner.outcomes == [None]
    assert not ran


@pytest.mark.parametrize("limits", [Limits(0.001, None), Limits(None, 0.001)])
def test_time_limits_count_from_the_first_step(runner: asyncio.Runner, limits: Limits) -> None:
    """A process that gets no processor for a while loses no task by it."""
    runner.run(check_limits_after_a_stall(limits))


async def check_limits_after_a_stall(limits: Limits) -> None:
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    _, owner = started(lambda: await_(ended), limits)
    loop.call_soon(time.sleep, 0.05)  # behind `begin`, before the first step
    await asyncio.wait_for(owner.left.wait(), LONG)
    assert owner.reached == [limits.soft is not None]
    assert len(owner.outcomes) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_job_that_has_ended_goes_without_the_garbage_collector(
    runner: asyncio.Runner, fails: bool
) -> None:
    """With it goes Celery's request; a busy worker would keep thousands until a collection."""
    gc.disable()
    try:
        assert runner.run(gone_after_its_end(fails=fails))
    finally:
        gc.enable()


async def gone_after_its_end(*, fails: bool) -> bool:
    kept: list[contextvars.Context] = []  # as an HTTP connection keeps it

    async def waits() -> None:
        await asyncio.sleep(0)
        if fails:
            raise ValueError

    def body() -> None:
        kept.append(contextvars.copy_context())
        with contextlib.suppress(ValueError):
            await_(waits())

    job, owner = started(body, Limits(LONG, LONG))
    ended = weakref.ref(job)
    del job
    await asyncio.wait_for(owner.left.wait(), LONG)
    await asyncio.sleep(0)  # the task itself ends behind its report
    await asyncio.sleep(0)
    return bool(kept) and ended() is None
