"""Celery's time limits under the pools that cannot end a step by them.

Celery's threads and solo know no limits, and prefork's hard one is a SIGKILL, after which nobody
commits. Under these pools a step or a tool call enforces the limits itself: the hard one a moment
before Celery's own. The asyncio pool ends its tasks by itself. Knows neither steps nor Redis.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from celery.exceptions import SoftTimeLimitExceeded

from stepfleet.worker.engine.bridge import TIME_IS_UP

T = TypeVar("T")

MOST_AHEAD = 1.0
"""Seconds before a hard limit at which a step ends, to commit what there is."""
SHARE_AHEAD = 0.2

_PREFORK = "celery.concurrency.prefork"
_WITHOUT_LIMITS = ("celery.concurrency.thread", "celery.concurrency.solo")


class TimeLimits:
    """The limits of one worker: Celery's options for all tasks, and each task's own."""

    def __init__(self) -> None:
        self._pool = ""
        self._hard: float | None = None
        self._soft: float | None = None

    def note(self, worker: Any) -> None:
        """Read a worker's pool and options, before its pool starts."""
        self._pool = getattr(worker.pool_cls, "__module__", "")
        self._hard, self._soft = worker.time_limit, worker.soft_time_limit

    def keep(self, task: Any, work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Return a coroutine that runs `work` within the time limits of `task`'s request."""
        if self._pool != _PREFORK and self._pool not in _WITHOUT_LIMITS:
            return work
        seconds = self.seconds(task)
        return work if seconds is None else _ended_after(seconds, work)

    def seconds(self, task: Any) -> float | None:
        """Return after how many seconds a request of `task` is to end itself; None: never."""
        hard, soft = task.request.timelimit or (None, None)
        hard = hard or task.time_limit or self._hard
        soft = soft or task.soft_time_limit or self._soft
        limits = [hard - min(MOST_AHEAD, hard * SHARE_AHEAD)] if hard else []
        if soft and self._pool != _PREFORK:  # which raises it in the task itself
            limits.append(soft)
        return min(limits, default=None)


async def _ended_after(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - coroutines run in tasks
    timer = asyncio.get_running_loop().call_later(seconds, task.cancel, TIME_IS_UP)
    try:
        return await work
    except asyncio.CancelledError as cancelled:
        if TIME_IS_UP in cancelled.args:
            raise SoftTimeLimitExceeded(seconds) from None
        raise
    finally:
        timer.cancel()
