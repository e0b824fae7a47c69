"""Tasks that the pool runs as a coroutine, without Celery's tracer and its greenlet.

For a message that asks for nothing but the task, the tracer of a task that succeeds, keeps no
result, and of which nobody hears, does nothing. Decides when that is so. Whatever else comes of
the coroutine is left to the tracer: it gets the answer, or the error, where its body waits.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from functools import lru_cache
from typing import Any

from celery import Task, signals
from celery._state import _task_stack
from celery.app import trace
from celery.app.task import Context
from celery.loaders.base import BaseLoader
from celery.utils.saferepr import saferepr
from celery.utils.threads import release_local

from stepfleet.worker.engine.messages import Headers, Inadmissible

OURS = "stepfleet-"
"""How the `dispatch_uid` of receivers begins that read no more of a task than they are told."""

_SENT_AFTERWARDS = (signals.task_postrun, signals.task_success)
_HOOKS = ("before_start", "on_success", "after_return")
_OUTCOMES = 64

shown = lru_cache(_OUTCOMES)(saferepr)


class KnownRequest(Context):
    """What `celery.current_task.request` is. Celery lists its own headers anew for each."""

    _OF_CELERY = frozenset(vars(Context)) | {
        "lang",
        "task",
        "argsrepr",
        "kwargsrepr",
        "compression",
    }

    def _get_custom_headers(self, given: dict[str, Any], **more: Any) -> dict[str, Any] | None:
        fields = given | more
        if fields.keys() <= self._OF_CELERY:
            return None
        return {name: one for name, one in fields.items() if name not in self._OF_CELERY}


class WaitingTask(Task, ABC):
    """A task whose body does no more than `self.end(await_(self.begin(...)))`."""

    @abstractmethod
    def begin(self, args: Any, kwargs: Any, message: Headers) -> Coroutine[Any, Any, Any]:
        """Return what the body waits for. Raises `Inadmissible` for a message to be put aside."""

    @abstractmethod
    def end(self, answer: Any) -> str:
        """Return the task's result, or raise what is its end, from what the body waited for."""


class DirectCall:
    """One request whose task needs no tracer as long as it succeeds."""

    __slots__ = ("_began", "_request")

    def __init__(self, request: Any) -> None:
        self._request = request

    def begin(self) -> Coroutine[Any, Any, Any] | None:
        """Return the task's coroutine, or None where the tracer is needed from the beginning."""
        request, task = self._request, self._request.task
        if any(signal.receivers for signal in _SENT_AFTERWARDS) or _strangers_hear_of_beginnings():
            return None
        self._began = time.monotonic()
        args, kwargs = request.args, request.kwargs
        # What a tool reads by `celery.current_task`, and tasks that it sends have for a parent.
        known = KnownRequest(request.request_dict, args=args, kwargs=kwargs, called_directly=False)
        _begin_stack(_task_stack, task)
        _begin_stack(task.request_stack, known)
        told = {"task_id": request.id, "task": task, "args": args, "kwargs": kwargs}
        signals.task_prerun.send(sender=task, **told)
        try:
            begun: Coroutine[Any, Any, Any] = task.begin(args, kwargs, known)
        except Inadmissible:
            self.leave()
            return None
        return begun

    def leave(self) -> None:
        """Forget the task: its coroutine has ended."""
        _end_stack(self._request.task.request_stack)
        _end_stack(_task_stack)

    def end(self, answer: Any) -> tuple[int, str, float] | None:
        """Return what the tracer returns for a success, or None where it is none."""
        request = self._request
        try:
            result = request.task.end(answer)
        except Exception:  # noqa: BLE001 - the tracer gets it from its body once more
            return None
        text = shown(result, request.task.resultrepr_maxsize)
        runtime = time.monotonic() - self._began
        if trace.logger.isEnabledFor(logging.INFO):
            said = {"id": request.id, "name": request.name, "return_value": text}
            further = {"args": request.argsrepr, "kwargs": request.kwargsrepr, "runtime": runtime}
            trace.info(trace.LOG_SUCCESS, said | further)
        return 0, text, runtime


# Celery's `push` and `pop` look in vain for what nobody has used yet, by exceptions: for a task
# that has its stacks to itself they take nine times as long.


def _begin_stack(stack: Any, first: object) -> None:
    """Begin the stack that one of Celery's has for this job."""
    local = stack._local  # noqa: SLF001
    local.__storage__[local.__ident_func__()] = {"stack": [first]}


def _end_stack(stack: Any) -> None:
    """Forget it, with whatever the task has left on it."""
    release_local(stack._local)  # noqa: SLF001


def _strangers_hear_of_beginnings() -> bool:
    """Tell whether receivers of `task_prerun` may look at the task's request, as instruments do."""
    receivers = signals.task_prerun.receivers
    return any(not str(uid).startswith(OURS) for (uid, _), _ in receivers)


def direct_call(request: Any) -> DirectCall | None:
    """Return how a request of Celery's runs without the tracer, or None where it does not."""
    task = getattr(request, "task", None)
    if not isinstance(task, WaitingTask) or _is_customised(task):
        return None
    options = request._payload[2]  # noqa: SLF001 - Celery has no other name for them
    asks_for_more = options and (not isinstance(options, dict) or any(options.values()))
    return None if asks_for_more or not request.ignore_result else DirectCall(request)


@lru_cache
def _is_customised(task: WaitingTask) -> bool:
    """Tell whether the tracer calls further code: of the task's class, its app, or instruments.

    These put functions of their own in the place of the task's or of Celery's.
    """
    app, loader = task.app, type(task.app.loader)
    tracer = getattr(trace.build_tracer, "__code__", None)
    return (
        bool(app.conf.worker_deduplicate_successful_tasks)
        or not vars(task).keys().isdisjoint(("run", "__call__"))
        or tracer is None
        or tracer.co_filename != trace.__file__
        or any(trace.task_has_custom(task, hook) for hook in _HOOKS)
        or loader.on_task_init is not BaseLoader.on_task_init
        or loader.on_process_cleanup is not BaseLoader.on_process_cleanup
    )
