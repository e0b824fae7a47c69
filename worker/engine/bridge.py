"""Lets a synchronous Celery task body wait for a coroutine, under every worker pool.

Decides where the coroutine runs: on the pool's event loop while the task's greenlet is suspended,
or, under any other pool, on one background loop per process while the calling thread blocks.
Must not know Celery, Redis, or what the coroutine does.

A collaborator that belongs to an event loop (an HTTP client, an asyncio Redis client) is declared
once with ``PerLoop`` and called inside coroutines; it is closed when its loop ends.
"""

import asyncio
import atexit
import concurrent.futures
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Generic, TypeVar

from greenlet import GreenletExit, getcurrent, greenlet  # type: ignore[import-untyped]

from stepfleet.worker.engine.loop_thread import LoopThread

T = TypeVar("T")

TIME_IS_UP = "the task's soft time limit"
"""The message of a cancellation by a soft time limit."""

TERMINATED = "the task was terminated"
"""The message of a cancellation by a revocation with `terminate`."""

CLEANUP_SECONDS = 5.0
"""How long an interrupted caller waits for its cancelled coroutine to clean up after itself."""

CLOSE_SECONDS = 8.0
"""How long the collaborators of an ending loop may take to settle and to close, together."""

MOST_IDLE = 200
"""How many greenlets that have ended their body a thread keeps for further ones."""

# A signal that arrives between the interpreter's last look and a blocking call does not end that
# call, so waiting goes in slices. A bare lock, since futures and conditions are not safe against
# exceptions that a signal raises inside them.
_LOOK_SECONDS = 0.5

_HOMES: dict[int, LoopThread] = {}  # process id -> its loop; a forked child starts its own
_MAKING_HOME = threading.Lock()


_END_REASON: list[Callable[[], tuple[str, ...]]] = [tuple]
"""The one function that explains why this process is being ended while a body waits."""

_Closers = list[Callable[[], Awaitable[object]]]
_CLOSERS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Closers]
_CLOSERS = weakref.WeakKeyDictionary()


class TaskGreenlet(greenlet):
    """Runs synchronous bodies for a coroutine, which awaits their awaitables.

    One after the other: a new greenlet maps memory, which costs ten times as much as to reuse one
    that has ended its body. Get one by ``idle_greenlet``; the coroutine drives it::

        awaitable = body.begin(function)
        while not body.over:
            awaitable = body.switch(await awaitable)  # or body.throw(...)
        result = body.outcome()
    """

    def __init__(self) -> None:
        super().__init__(self._serve)
        self.over = True
        self._value: object = None
        self._error: BaseException | None = None
        self.switch()  # to where it waits for a body

    def begin(self, body: Callable[[], object]) -> Any:
        """Run ``body`` until it waits for an awaitable, which is returned, or until it is over."""
        driver = getcurrent()
        self.parent = driver
        self.gr_context = driver.gr_context  # body and coroutines share their context variables
        self.over = False
        return self.switch(body)

    def outcome(self) -> object:
        """Return what the body has returned, or raise what it has raised; once for each body."""
        value, error = self._value, self._error
        self._value = self._error = None
        self.gr_context = None
        if len(_idle.greenlets) < MOST_IDLE:
            _idle.greenlets.append(self)
        else:
            self.switch(None)
        if error is not None:
            raise error
        return value

    def wait_for(self, awaitable: Awaitable[T]) -> T:
        """Suspend until the driver has the result; raise what it throws in."""
        result: T = self.parent.switch(awaitable)
        return result

    def _serve(self) -> None:
        # One that waits is never collected as garbage: it has to end by itself.
        while (body := self.parent.switch()) is not None:
            try:
                self._value = body()
            except GreenletExit:
                raise  # nobody drives this greenlet any more
            except BaseException as error:  # noqa: BLE001 the driver decides its meaning
                self._error = error
            del body  # an idle greenlet must hold nothing
            self.over = True


class _Idle(threading.local):
    """The greenlets of a thread that wait for a body."""

    def __init__(self) -> None:
        self.greenlets: list[TaskGreenlet] = []


_idle = _Idle()


def idle_greenlet() -> TaskGreenlet:
    """Return a greenlet of this thread that has nothing to do."""
    return _idle.greenlets.pop() if _idle.greenlets else TaskGreenlet()


def await_(awaitable: Awaitable[T]) -> T:
    """Return the awaitable's result, from synchronous code.

    Inside a task of the asyncio pool only the task's greenlet waits. Elsewhere the thread blocks,
    and an exception that a signal raises in it (a soft time limit under prefork) cancels the
    coroutine, waits up to ``CLEANUP_SECONDS`` for it and goes on.

    Raises what the coroutine raises; ``concurrent.futures.CancelledError`` where it cancelled
    itself; ``RuntimeError`` in code that an event loop is running, which must use ``await``.
    """
    current = getcurrent()
    if isinstance(current, TaskGreenlet):
        return current.wait_for(awaitable)
    if _loop_runs_here():
        if inspect.iscoroutine(awaitable):
            awaitable.close()
        raise RuntimeError("await_() was called by a coroutine or a callback; use `await` there")
    return _block_on(home_loop(), awaitable)


def home_loop() -> LoopThread:
    """Return this process's loop: its pool's, else a background one that the first call starts."""
    home = _HOMES.get(os.getpid())
    if home is not None and home.usable:
        return home
    candidate = LoopThread("stepfleet-bridge")
    with _MAKING_HOME:
        home = _HOMES.get(os.getpid())
        if home is not None and home.usable:
            candidate.discard()
            return home
        candidate.start()
        _HOMES[os.getpid()] = candidate
    atexit.register(_end_home, os.getpid())
    return candidate


def create(loop: LoopThread) -> None:
    """Make the loop of a pool the one on which this process's coroutines run."""
    _HOMES[os.getpid()] = loop


def explain_ends(reason: Callable[[], tuple[str, ...]]) -> None:
    """Use `reason()` as arguments of the cancellation when a signal ends this process.

    It is called in the thread that waits; for pools that end a task by ending its process.
    """
    _END_REASON[0] = reason


def end_home() -> None:
    """End this process's own loop, and close what belongs to it: a pool's child is about to end.

    Such a child leaves without Python's exit handlers. Nothing where a pool has the loop.
    """
    _end_home(os.getpid())


def abandon(loop: LoopThread) -> None:
    """Forget the loop of a pool that has stopped."""
    if _HOMES.get(os.getpid()) is loop:
        del _HOMES[os.getpid()]


class PerLoop(Generic[T]):
    """A collaborator of which each event loop has one: ``client = PerLoop(make, close)``.

    Calling it inside a coroutine returns the running loop's instance, made at the first call.
    ``close`` is awaited with the instance when the loop ends.
    """

    def __init__(
        self, make: Callable[[], T], close: Callable[[T], Awaitable[object]] | None = None
    ) -> None:
        self._make = make
        self._close = close
        self._made: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, T]
        self._made = weakref.WeakKeyDictionary()

    def __call__(self) -> T:
        """Return the running loop's instance; raises ``RuntimeError`` where no loop runs."""
        loop = asyncio.get_running_loop()
        if loop in self._made:
            return self._made[loop]
        instance = self._made[loop] = self._make()
        close = self._close
        if close is not None:
            _CLOSERS.setdefault(loop, []).append(lambda: close(instance))
        return instance


async def close_collaborators() -> list[BaseException]:
    """Close what ``PerLoop`` made for the running loop, newest first; return what went wrong.

    What is not closed after ``CLOSE_SECONDS`` is cancelled. Ends the thread's idle greenlets, too.
    """
    loop = asyncio.get_running_loop()
    closers = _CLOSERS.pop(loop, [])
    deadline = loop.time() + CLOSE_SECONDS
    failures: list[BaseException] = []
    for close in reversed(closers):
        try:
            async with asyncio.timeout_at(deadline):
                await close()
        except Exception as error:  # noqa: BLE001 the others must be closed too
            failures.append(error)
    while _idle.greenlets:
        _idle.greenlets.pop().switch(None)
    return failures


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have cleaned up; those that are over stay as they are."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def self_cancelled() -> concurrent.futures.CancelledError:
    """Make the exception that a body gets where its coroutine cancelled itself."""
    return concurrent.futures.CancelledError("the coroutine cancelled itself")


def _loop_runs_here() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _block_on(home: LoopThread, awaitable: Awaitable[T]) -> T:
    results: list[T] = []
    errors: list[BaseException] = []
    running: list[asyncio.Task[None]] = []
    finished = threading.Lock()
    finished.acquire()

    async def capture() -> None:
        try:
            results.append(await awaitable)
        except asyncio.CancelledError:
            errors.append(self_cancelled())
        except BaseException as error:  # noqa: BLE001 SystemExit must reach the caller, not the loop
            errors.append(error)
        finally:
            finished.release()

    try:
        home.submit(lambda: running.append(home.loop.create_task(capture())))
        while not (results or errors):
            if not finished.acquire(timeout=_LOOK_SECONDS) and not home.usable:
                raise RuntimeError("the worker's event loop has ended; the coroutine is lost")  # noqa: TRY301
    except BaseException as error:
        # A soft limit is an exception that a signal raises here; an end of the process is not.
        why = (TIME_IS_UP,) if isinstance(error, Exception) else _END_REASON[0]()
        home.submit(lambda: [task.cancel(*why) for task in running])
        if home.usable and not (results or errors):
            finished.acquire(timeout=CLEANUP_SECONDS)
        raise
    if errors:
        raise errors.pop()  # which leaves no cycle through this frame
    return results[0]


def _end_home(pid: int) -> None:
    home = _HOMES.get(pid)
    if home is None or pid != os.getpid() or sys.is_finalizing():
        return
    del _HOMES[pid]
    home.stop(close_collaborators(), within=CLOSE_SECONDS + 1)
