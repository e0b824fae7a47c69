"""Threads for tools that are plain functions: bounded, and not starved by functions that hang.

A thread cannot be killed. One whose call was given up (its timeout passed, its run was
cancelled) is counted as hung until its function returns; up to `spare` hung threads are replaced
by new ones, so that the others go on. Beyond that, capacity shrinks, and calls that find no
thread within `start_timeout` fail. The threads are daemons: a hung function does not keep a
worker from ending, as it would inside concurrent.futures.ThreadPoolExecutor.

Most functions are over at once, and to wake a thread or a loop costs more than such a call. So a
burst of calls sends for a few threads only, and whoever takes a call sends for another one while
more are left: functions that take their time hold up none, and short ones need few threads. A
loop is woken once for all results that it has not seen yet.

Thread-safe, and bound to no event loop. Knows nothing of tools.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_NAME = "stepfleet-tool"
_MOST_COMING = 4
"""Threads that are on their way to a call; the busier the loop, the longer each of them takes."""


class ExpiredError(Exception):
    """The timeout passed: not a TimeoutError, which the function itself may raise."""


class NoThreadFreeError(Exception):
    """No thread took the call within `start_timeout`; the function was not started."""


@dataclass(slots=True, eq=False)
class _Job:
    """One call of a function; all times are monotonic ones, in seconds.

    `started` is set once a thread took it, `is_over` once it has its `value` or its `error`.
    `ended` has None in the `loop` that waits for it, or why it was given up.
    """

    run: Callable[[], Any]
    timeout: float
    latest_start: float
    loop: asyncio.AbstractEventLoop
    ended: asyncio.Future[Exception | None]
    look: asyncio.TimerHandle | None = None
    started: float | None = None
    is_over: bool = False
    abandoned: bool = False
    value: Any = None
    error: BaseException | None = None


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
        self._results: dict[asyncio.AbstractEventLoop, list[_Job]] = {}
        # Re-entrant: while it is held, the collector may close a call, which then leaves.
        self._lock = threading.RLock()
        self._called = threading.Condition(self._lock)
        self._coming = 0
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
        """Run `function` in a thread; return its value.

        `timeout` is in seconds from the moment that a thread takes the call (asyncio's own
        scope would count the wait for a thread). Raises `ExpiredError` when it has passed,
        `NoThreadFreeError`, and whatever the function raises.
        """
        loop, latest_start = asyncio.get_running_loop(), time.monotonic() + self._start_timeout
        job = _Job(function, timeout, latest_start, loop, loop.create_future())
        try:
            self._submit(job)
            self._look(job)
            late = await job.ended
        finally:
            self._leave(job)
        if late is not None:
            raise late
        error = job.error
        if error is None:
            return job.value
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise error
        # SystemExit would end the event loop, and StopIteration this coroutine.
        raise RuntimeError(f"ended with {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """End the idle threads now and the busy ones after their functions."""
        with self._lock:
            self._closed = True
            self._idle = 0
            self._called.notify_all()

    def _submit(self, job: _Job) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError("the tool threads are closed; this worker is ending")
            self._jobs.append(job)
            self._send()

    def _look(self, job: _Job) -> None:
        """Give the job up where its time is over, else look again when it may be."""
        if job.is_over or job.ended.done():
            return
        try:
            pause = self._time_left(job)
        except (ExpiredError, NoThreadFreeError) as late:
            job.ended.set_result(late)
        else:
            job.look = job.loop.call_later(pause, self._look, job)

    def _time_left(self, job: _Job) -> float:
        now = time.monotonic()
        with self._lock:
            if job.started is None and now >= job.latest_start:
                self._jobs.remove(job)  # or a thread could take it still
                raise NoThreadFreeError(
                    f"no thread was free within {self._start_timeout:g} s; {self._hung} of "
                    f"{self._alive} run functions that hang"
                )
        if job.started is None:
            return max(min(job.timeout, job.latest_start - now), 0.01)
        left = job.started + job.timeout - now
        if left <= 0:
            raise ExpiredError
        return left

    def _leave(self, job: _Job) -> None:
        """Count the job's thread as hung if its function still runs; forget it if it waits."""
        if job.look is not None:
            job.look.cancel()
        if job.is_over:
            return
        with self._lock:
            if job.started is None:
                with contextlib.suppress(ValueError):
                    self._jobs.remove(job)
            elif not job.is_over:
                job.abandoned = True
                self._hung += 1
                self._send()

    @property
    def _capacity(self) -> int:
        return self._threads + min(self._hung, self._spare)

    def _send(self) -> None:
        """Send a thread for the calls that wait: an idle one, or a new one."""
        if len(self._jobs) <= self._coming or self._coming >= _MOST_COMING:
            return
        if self._idle:
            self._idle -= 1
            self._called.notify()
        elif self._alive < self._capacity:
            try:
                threading.Thread(target=self._work, name=_NAME, daemon=True).start()
            except RuntimeError:  # the system gives no more: those that there are take the calls
                if not self._alive:
                    raise
                return
            self._alive += 1
        else:
            return
        self._coming += 1

    def _work(self) -> None:
        with self._lock:
            self._coming -= 1
        while (job := self._next()) is not None:
            try:
                job.value = job.run()
            except BaseException as raised:  # noqa: BLE001 - also SystemExit: it ends the call only
                job.error = raised
            needed = self._finish(job)
            del job  # an idle thread keeps no result alive
            if not needed:
                return

    def _next(self) -> _Job | None:
        """Wait for a job, and take it; None ends the thread."""
        with self._lock:
            while not self._jobs:
                if self._closed:
                    self._alive -= 1
                    return None
                self._idle += 1
                self._called.wait()
                self._coming -= 1
            job = self._jobs.popleft()
            job.started = time.monotonic()
            self._send()
            return job

    def _finish(self, job: _Job) -> bool:
        """Hand the result over; return whether the thread is still needed."""
        with self._lock:
            job.is_over = True
            if job.abandoned:
                self._hung -= 1
            else:
                self._report(job)
            is_surplus = self._alive > self._capacity
            self._alive -= is_surplus
            return not is_surplus

    def _report(self, job: _Job) -> None:
        results = self._results.setdefault(job.loop, [])
        results.append(job)
        if len(results) == 1:
            try:
                job.loop.call_soon_threadsafe(self._deliver, job.loop)
            except RuntimeError:  # it was closed, and nobody waits
                del self._results[job.loop]

    def _deliver(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            results = self._results.pop(loop)
        for job in results:
            if not job.ended.done():
                job.ended.set_result(None)
