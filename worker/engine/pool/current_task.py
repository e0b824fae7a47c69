"""Makes ``current_task`` and ``self.request`` of Celery follow the job.

Celery keys those stacks by greenlet. The greenlet of a task body and the coroutines that it waits
for are different greenlets, so here the key is a context variable, which bodies, coroutines, their
child tasks and their threads (``asyncio.to_thread``) share, and which other jobs do not see.
"""

from contextvars import ContextVar
from typing import Any

from celery._state import _task_stack
from celery.exceptions import ImproperlyConfigured
from greenlet import getcurrent  # type: ignore[import-untyped]

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
