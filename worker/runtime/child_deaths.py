"""Counts the deaths of a pool's children, where Celery reports them: prefork.

A child does one thing at a time, so its death while its parent lives counts against its work.
Called in the parent, where no event loop runs. Celery reports the task, not the child: that is
read from the store, and trusted where that process is gone from this machine.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from celery.exceptions import TimeLimitExceeded, WorkerLostError

from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.settings.settings import TASK, TOOL_TASK, Settings
from stepfleet.orchestrator.store.fleet.overview import is_gone_here
from stepfleet.orchestrator.store.store import open_store
from stepfleet.worker.engine.messages import Inadmissible, work_in

log = logging.getLogger(__name__)

_PATIENCE_SECONDS = 2.0
_DEATHS = (WorkerLostError, TimeLimitExceeded)


def counts_lost_children(
    settings: Settings,
    is_stopping: Callable[[], bool],
    requests: "Requests",
    node: Callable[[], str],
) -> Callable[..., None]:
    """Return a receiver of Celery's signal `task_failure`.

    `requests` knows which child was given a task; `node` returns the name of Celery's worker.
    """

    def receive(
        sender: Any = None,
        exception: Any = None,
        args: Any = (),
        kwargs: Any = None,
        task_id: str = "",
        **_: Any,
    ) -> None:
        task = getattr(sender, "name", "")
        if task not in (TASK, TOOL_TASK) or not isinstance(exception, _DEATHS) or is_stopping():
            return
        # Celery reports a hard time limit right before the SIGKILL.
        is_gone: Callable[[str], bool] = partial(is_gone_here, host=node())
        if isinstance(exception, TimeLimitExceeded):
            is_gone = partial(is_child, node=node(), pid=requests.pid_of(task_id))
        try:
            hint = work_in(task, args, kwargs or {})
            asyncio.run(_count(settings, hint, is_gone))
        except Inadmissible:
            return
        except (AgentException, OSError) as error:
            log.warning("the death of a child could not be counted, its lease runs out: %s", error)

    return receive


async def _count(settings: Settings, hint: Work, is_gone: Callable[[str], bool]) -> None:
    quick = settings.model_copy(update={"patience": _PATIENCE_SECONDS})
    async with aclosing(await open_store(quick)) as store:
        worker = await store.marks.worker_of(hint)
        if is_gone(worker) and await store.marks.child_died(hint, worker):
            log.warning(
                "a child has died with step %d of run %s in its hands", hint.step + 1, hint.run_id
            )


class Requests:
    """The unfinished tasks that this process has received: a receiver of `task_received`."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[str, Any] = WeakValueDictionary()

    def __call__(self, request: Any = None, **_: Any) -> None:
        """Note a task; it is forgotten when Celery lets go of it."""
        if request is not None:
            self._known[request.id] = request

    def pid_of(self, task_id: str) -> int | None:
        """Return the process that was given a task, or None where nobody is known to have it."""
        pid: int | None = getattr(self._known.get(task_id), "worker_pid", None)
        return pid


def child_name(node: str, pid: int) -> str:
    """Return the name of a child of the pool of the worker `node`."""
    return f"{node}:{pid}"


def is_child(worker: str, node: str, pid: int | None) -> bool:
    """Return whether a worker's name is of the child `pid` of `node`."""
    return pid is not None and worker == child_name(node, pid)
