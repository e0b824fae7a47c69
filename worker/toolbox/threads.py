"""Threads for tools that are plain functions: bounded, and not starved by functions that hang.

A thread cannot be killed. One whose call was given up (its timeout passed, its run was
cancelled) is counted as hung until its function returns; up to `spare` hung threads are replaced
by new ones, so that the others go on. Beyond that, capacity shrinks, and calls that find no
thread within `start_timeout` fail. The threads are daemons: a hung function does not keep a
worker from ending, as it would inside concurrent.futures.ThreadPoolExecutor.

Thread-safe, and bound to no event loop. Knows nothing of tools.
"""

import asyncio
import contextlib
import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

_NAME = "stepfleet-tool"


class ExpiredError(Exception):
    """The timeout passed: not a TimeoutError, which the function itself may raise."""


class NoThreadFreeError(Exception):
    """No thread took the call within `start_timeout`; the function was not started."""


@dataclass(slots=True, eq=False)
class _Job:
    """One call of a function; `started` is monotonic time in seconds once a thread took it.

    The future holds the function's value or its exception as a value: an exception such as
    StopIteration cannot travel through a future.
    """

    run: Callable[[], Any]
    future: Future[tuple[Any, BaseException | None]] = field(default_factory=Future)
    started: float | None = None
    abandoned: bool = False


class ToolThreads:
    """At most `threads` functions at once, plus `spare` threads in place of hung ones.

    `start_timeout` is in seconds. With `patient` tools have no time limits: a person may be at a
    debugger's prompt. `inline` ones run in the calling thread, where debuggers work.
    """

    def __init__(
        self,
        threads: int = 32,
        *,
        spare: int = 32,
        start_timeout: float = 300,
        patient: bool = False,
        inline: bool = False,
    ) -> None:
        self.patient = patient
        self.inline = inline
        self._threads = threads
        self._spare = spare
        self._start_timeout = start_timeout
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._idle = 0
        self._alive = 0
        self._hung = 0
        self._closed = False

    @property
    def hung(self) -> int:
        """How many threads run functions that were given up."""
        return self._hung

    @property
    def waiting(self) -> int:
        """How many calls wait for a thread."""
        return len(self._jobs)

    async def run(self, function: Callable[[], Any], *, timeout: float) -> Any:  # noqa: ASYNC109
        """Run `function` in a thread, with the caller's context variables; return its value.

        `timeout` is in seconds from the moment that a thread takes the call (asyncio's own
        scope would count the wait for a thread). Raises `ExpiredError` when it has passed,
        `NoThreadFreeError`, and whatever the function raises.
        """
        context = contextvars.copy_context()
        job = _Job(lambda: context.run(function))
        self._submit(job)
        try:
            await self._finished(job, timeout)
        finally:
            self._leave(job)
        value, error = job.future.result()
        if error is None:
            return value
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise error
        # SystemExit would end the event loop, and StopIteration this coroutine.
        raise RuntimeError(f"ended with {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """End the idle threads now and the busy ones after their functions."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    async def _finished(self, job: _Job, timeout: float) -> None:  # noqa: ASYNC109 - as in run
        done = asyncio.wrap_future(job.future)
        latest_start = time.monotonic() + self._start_timeout
        try:
            pause = min(timeout, self._start_timeout)
            while not (await asyncio.wait({done}, timeout=pause))[0]:
                pause = self._time_left(job, timeout, latest_start)
        finally:
            done.cancel()  # a result that comes later must not look for this loop

    def _time_left(self, job: _Job, timeout: float, latest_start: float) -> float:
        now = time.monotonic()
        if job.started is not None:
            left = job.started + timeout - now
            if left <= 0:
                raise ExpiredError
            return left
        if now >= latest_start and job.future.cancel():
            raise NoThreadFreeError(
                f"no thread was free within {self._start_timeout:g} s; {self._hung} of "
                f"{self._alive} run functions that hang"
            )
        return max(min(timeout, latest_start - now), 0.01)

    def _submit(self, job: _Job) -> None:
        with self._changed:
            if self._closed:
                raise RuntimeError("the tool threads are closed; this worker is ending")
            self._jobs.append(job)
            self._grow()
            self._changed.notify()

    def _leave(self, job: _Job) -> None:
        """Count the job's thread as hung if its function still runs; forget it if it waits."""
        if job.future.cancel():
            with self._changed, contextlib.suppress(ValueError):
                self._jobs.remove(job)
            return
        with self._changed:
            if not job.future.done():
                job.abandoned = True
                self._hung += 1
                self._grow()

    @property
    def _capacity(self) -> int:
        return self._threads + min(self._hung, self._spare)

    def _grow(self) -> None:
        if self._idle < len(self._jobs) and self._alive < self._capacity:
            self._alive += 1
            threading.Thread(target=self._work, name=_NAME, daemon=True).start()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            needed = self._do(job)
            del job  # an idle thread keeps no result alive
            if not needed:
                return

    def _do(self, job: _Job) -> bool:
        """Run the job; return whether the thread is still needed."""
        job.started = time.monotonic()
        if not job.future.set_running_or_notify_cancel():
            return True
        value, error = None, None
        try:
            value = job.run()
        except BaseException as raised:  # noqa: BLE001 - also SystemExit: it ends the call only
            error = raised
        with self._changed:
            if job.abandoned:
                self._hung -= 1
            surplus = self._alive > self._capacity
            self._alive -= surplus
            # Inside the lock, so that a call cannot be given up between count and result.
            job.future.set_result((value, error))
        return not surplus

    def _next(self) -> _Job | None:
        with self._changed:
            while not self._jobs:
                if self._closed:
                    self._alive -= 1
                    return None
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            return self._jobs.popleft()
