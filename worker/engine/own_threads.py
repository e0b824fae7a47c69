"""Runs tasks of the user's own in threads, where a pool would run them in its event loop.

A body that blocks, computes or calls `asyncio.run` would delay every step of the process, or fail.
Knows nothing of steps.
"""

import asyncio
import threading
from collections.abc import Callable
from contextvars import copy_context
from functools import wraps
from typing import Any

from celery import Task
from greenlet import getcurrent  # type: ignore[import-untyped]

from stepfleet.worker.engine.bridge import PerLoop, TaskGreenlet, await_

MOST_THREADS = 200
"""Tasks of the user's own that run at once in one process; others wait in their slots."""

_room = PerLoop(lambda: asyncio.Semaphore(MOST_THREADS))


def give_thread(task: Task) -> None:
    """Let the task's body run in a thread of its own wherever a pool runs it in its event loop.

    Those whose body itself names `await_` stay there: they wait without a thread. The attribute
    `thread` of a task says otherwise: `@app.task(thread=False)`.
    """
    run = task.run
    if not getattr(task, "thread", not _awaits(run)):
        return

    @wraps(run)
    def threaded(*args: Any, **kwargs: Any) -> Any:
        if not isinstance(getcurrent(), TaskGreenlet):
            return run(*args, **kwargs)
        value, error = await_(_in_thread(lambda: run(*args, **kwargs)))
        if error is not None:
            raise error
        return value

    task.run = threaded


def _awaits(run: Callable[..., Any]) -> bool:
    """Return whether the code of a function names `await_`."""
    while (inner := getattr(run, "__wrapped__", None)) is not None:
        run = inner
    return await_.__name__ in getattr(getattr(run, "__code__", None), "co_names", ())


async def _in_thread(body: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Return what a thread of its own returns or raises. Where it is cancelled, that goes on."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = copy_context()  # Celery finds the task's request by it

    def end(outcome: tuple[Any, BaseException | None]) -> None:
        if not ended.done():
            ended.set_result(outcome)

    def work() -> None:
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = context.run(body), None
        except BaseException as error:  # noqa: BLE001 - the task's own, raised where it waits
            outcome = None, error
        loop.call_soon_threadsafe(end, outcome)

    async with _room():
        threading.Thread(target=work, daemon=True, name="stepfleet-own-task").start()
        return await ended
