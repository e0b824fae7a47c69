"""Limits the tasks that a worker accepts beside its own two: Celery's, and the user's own.

Celery registers tasks in every app (`celery.group`, `celery.chord` and others). Their arguments
name tasks and queues, so a message for one makes a worker publish whatever a stranger wrote.
Decides by names; knows nothing of steps.
"""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

from celery import Celery, Task
from celery.exceptions import Reject

from stepfleet.orchestrator.settings.settings import TASK, TOOL_TASK
from stepfleet.worker.engine.admission import Gate, Inadmissible

log = logging.getLogger(__name__)

CELERYS = "celery."
PutAside = Callable[[Task, Inadmissible], Reject]


def limit_tasks(app: Celery, gate: Gate | None, put_aside: PutAside) -> None:
    """Keep the app's own tasks and those of its user, before a worker consumes.

    Celery's stay only where the user has tasks and messages are not signed. With a `gate`, each
    message for a task of the user's needs a signature over `[args, kwargs]`.
    """
    theirs = sorted(
        name for name in app.tasks if name not in (TASK, TOOL_TASK) and not name.startswith(CELERYS)
    )
    if gate or not theirs:
        for name in [one for one in app.tasks if one.startswith(CELERYS)]:
            app.tasks.pop(name)
    if gate:
        for name in theirs:
            _guard(app.tasks[name], gate, put_aside)
    if theirs:
        rule = "their messages must be signed" if gate else "anybody who can publish may start them"
        log.info("this worker takes tasks beside the fleet's (%s): %s", rule, ", ".join(theirs))


def _guard(task: Task, gate: Gate, put_aside: PutAside) -> None:
    run = task.run

    @wraps(run)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if not task.request.called_directly:
            try:
                gate.check(task.name, [list(args), kwargs], task.request)
            except Inadmissible as refusal:
                raise put_aside(task, refusal) from None
        return run(*args, **kwargs)

    task.run = guarded
