"""One task in the pool, run by one asyncio task: its coroutine, or Celery's tracer in a greenlet.

Decides what a task body sees when it is interrupted, and which outcome leaves the loop. Must not
know slots, channels or Celery's requests beyond the callbacks that it carries.
"""

import asyncio
import signal
from asyncio import CancelledError
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from billiard.einfo import ExceptionInfo
from celery._state import _task_stack
from celery.exceptions import ImproperlyConfigured, SoftTimeLimitExceeded, WorkerLostError
from greenlet import getcurrent  # type: ignore[import-untyped]

from stepfleet.worker.engine.bridge import (
    TERMINATED,
    TIME_IS_UP,
    TaskGreenlet,
    idle_greenlet,
    self_cancelled,
)
from stepfleet.worker.engine.pool.direct import DirectCall

running_job: ContextVar[object] = ContextVar("stepfleet_running_job")


def follow_jobs(app: Any) -> None:
    """Key the stacks of the app's tasks by job; raises ``ImproperlyConfigured`` where it cannot."""
    stacks = [_task_stack, *(task.request_stack for task in app.tasks.values())]
    for stack in stacks:
        if not hasattr(type(stack), "__ident_func__"):
            raise ImproperlyConfigured(
                "USE_FAST_LOCALS is set in the environment: it makes Celery confuse the requests"
                " of tasks that share a thread. Unset it to use stepfleet.worker.engine.pool"
            )
        stack.__ident_func__ = _whose


def _whose() -> object:
    return running_job.get(None) or getcurrent()


GRACE_SECONDS = 5.0
"""How long a task that was ended keeps its slot while it cleans up; afterwards it is abandoned."""


@dataclass(slots=True, eq=False)
class Callbacks:
    """Celery's callbacks for one request; called in the worker's thread only."""

    accepted: Callable[[int, float], object]
    succeeded: Callable[[object], object]
    failed: Callable[[ExceptionInfo], object]
    timed_out: Callable[[bool, float], object]


@dataclass(slots=True, eq=False)
class Limits:
    """Seconds after which a task is interrupted (soft), and after which it is ended (hard)."""

    soft: float | None
    hard: float | None


class Owner(Protocol):
    """The pool, as its jobs see it; every call is made in the loop's thread."""

    def finished(self, job: "PoolJob", outcome: object) -> None:
        """The job has ended with a return value, or an ``ExceptionInfo``."""

    def limit_reached(self, job: "PoolJob", *, soft: bool) -> None:
        """A time limit has passed."""

    def is_revoked(self, job: "PoolJob") -> bool:
        """Return whether this very task was revoked; called in any thread."""

    def abandoned(self, job: "PoolJob") -> None:
        """The job was ended and has not ended within the grace period."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class PoolJob:
    """A running task as Celery sees it: ``terminate`` and ``wait`` are its interface."""

    target: Callable[[], object]
    callbacks: Callbacks
    limits: Limits
    _owner: Owner
    _loop: asyncio.AbstractEventLoop
    _direct: DirectCall | None = None
    terminated_by: int | None = field(default=None, init=False)
    """Belongs to the worker's thread."""
    settled: bool = field(default=False, init=False)
    """Belongs to the worker's thread: Celery knows how the task ended."""
    _starting: asyncio.Task[None] | None = field(default=None, init=False)
    _task: asyncio.Task[None] | None = field(default=None, init=False)
    _timers: list[asyncio.TimerHandle] = field(default_factory=list, init=False)
    _doomed: bool = field(default=False, init=False)  # it must not report anything any more
    _soft_is_due: bool = field(default=False, init=False)
    _ended: bool = field(default=False, init=False)

    def terminate(self, signum: int | None = None) -> None:
        """Cancel the task in the loop, whatever the signal; with `TERMINATED` where it was revoked.

        A cold shutdown of Celery ends its tasks by this call, too.
        """
        self.terminated_by = signum or signal.SIGTERM
        self.end(*((TERMINATED,) if self._owner.is_revoked(self) else ()))

    def end(self, *why: str) -> None:
        """Cancel the task in the loop with `why` (nothing: the worker stops); any thread."""
        try:
            self._loop.call_soon_threadsafe(self._doom, *why)
        except RuntimeError:  # the loop has ended, and the task with it
            return

    def wait(self, timeout: float | None = None) -> None:
        """Return at once: Celery has nothing to wait for after ending a task here."""

    def begin(self) -> None:
        """Start in the loop's thread."""
        self._starting = self._loop.create_task(self._run())

    async def _run(self) -> None:
        # Known only from here on: a task that is cancelled before its first step never runs.
        self._task = self._starting
        if self._doomed:
            self._leave(None)
            return
        if self.limits.soft:
            self._timers.append(self._loop.call_later(self.limits.soft, self._soft_limit))
        if self.limits.hard:
            self._timers.append(self._loop.call_later(self.limits.hard, self._hard_limit))
        # No more than a name: connections that are made here keep a copy of the context for life.
        running_job.set(object())
        try:
            outcome = await self._outcome()
        except BaseException as error:  # noqa: BLE001 nothing may escape into the loop
            outcome = _failure(error)
        self._leave(outcome)

    async def _outcome(self) -> object:
        """Await the task's own coroutine, where it has one; run the target unless that is all."""
        begun = self._direct.begin() if self._direct else None
        if self._direct is None or begun is None:
            return await self._drive(idle_greenlet())
        ended = await _ended(begun)
        self._direct.leave()
        if ended.error is None and not self._doomed:
            outcome = self._direct.end(ended.value)
            if outcome is not None:
                return outcome
        return await self._drive(idle_greenlet(), ended)

    async def _drive(self, body: TaskGreenlet, ended: "_Ended | None" = None) -> object:
        """Run the target; await its awaitables on this loop: the first one may have ended."""
        awaitable = body.begin(self.target)
        if ended is not None and not body.over:
            awaitable.close()  # what has ended is another one of its kind
            awaitable = ended.again()
        while not body.over:
            try:
                answer = await awaitable
            except BaseException as error:  # noqa: BLE001 every exception belongs to the body
                seen = self._as_the_body_sees(error)
                awaitable = body.throw(type(seen), seen, seen.__traceback__)
                del seen  # its traceback names this frame
            else:
                self._forget_interruption()
                awaitable = body.throw(CancelledError()) if self._doomed else body.switch(answer)
        return body.outcome()

    def _as_the_body_sees(self, error: BaseException) -> BaseException:
        if self._doomed:
            return error if isinstance(error, CancelledError) else CancelledError()
        if not isinstance(error, CancelledError):
            return error
        if self._forget_interruption():
            limit: BaseException = SoftTimeLimitExceeded(self.limits.soft)
            return limit.with_traceback(error.__traceback__)
        return self_cancelled()

    def _forget_interruption(self) -> bool:
        """Let the next coroutine start unharmed; return whether the soft limit had interrupted."""
        task = self._task
        while task is not None and task.cancelling():
            task.uncancel()  # or its timeouts and task groups would misbehave
        soft, self._soft_is_due = self._soft_is_due, False
        return soft

    def _soft_limit(self) -> None:
        self._soft_is_due = True
        if self._task is not None:
            self._task.cancel(TIME_IS_UP)
        self._owner.limit_reached(self, soft=True)

    def _hard_limit(self) -> None:
        self._owner.limit_reached(self, soft=False)
        self._doom(TIME_IS_UP)

    def _doom(self, *why: str) -> None:
        if self._doomed or self._ended:
            return
        self._doomed = True
        self._cancel(*why)
        self._timers.append(self._loop.call_later(GRACE_SECONDS, self._abandon))

    def _cancel(self, *why: str) -> None:
        if self._task is not None:
            self._task.cancel(*why)

    def _abandon(self) -> None:
        if self._task is not None and not self._ended:
            self._owner.abandoned(self)

    def _leave(self, outcome: object) -> None:
        self._ended = True
        for timer in self._timers:
            timer.cancel()
        self._owner.finished(self, outcome)


@dataclass(slots=True)
class _Ended:
    """What came of an awaitable."""

    value: object = None
    error: BaseException | None = None

    async def again(self) -> object:
        """Return or raise it, once."""
        if self.error is None:
            return self.value
        try:
            raise self.error
        finally:
            self.error = None  # whose traceback names this frame


async def _ended(awaitable: Awaitable[object]) -> _Ended:
    try:
        return _Ended(await awaitable)
    except BaseException as error:  # noqa: BLE001 every exception belongs to the task's body
        return _Ended(error=error)


def _failure(error: BaseException) -> Any:
    """Make Celery's record of what escaped the tracer, in the way of ``apply_target``."""
    if isinstance(error, (Exception, SystemExit, KeyboardInterrupt)):
        return ExceptionInfo((type(error), error, error.__traceback__))
    lost = WorkerLostError(repr(error)).with_traceback(error.__traceback__)
    return ExceptionInfo((WorkerLostError, lost, lost.__traceback__))
