"""Limits the tasks that a worker accepts beside its own two: Celery's, and the user's own.

Celery registers tasks in every app (`celery.group`, `celery.chord` and others). Their arguments
name tasks and queues, so a message for one makes a worker publish whatever a stranger wrote.
Decides by names; knows nothing of steps.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

from celery import Celery, Task
from celery.exceptions import Reject
from celery.utils.saferepr import saferepr

from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.settings.settings import TASK, TOOL_TASK, Settings
from stepfleet.orchestrator.store.dispatch import client_app
from stepfleet.orchestrator.store.fleet.quarantine import KEPT_BYTES, entry, keep_aside
from stepfleet.orchestrator.store.store import open_store
from stepfleet.worker.engine.admission import Gate, Inadmissible
from stepfleet.worker.engine.own_threads import give_thread
from stepfleet.worker.engine.transport.ack_buffer import AckBufferChannel

_SHOWN = 200
_PATIENCE_SECONDS = 2.0


def dead_letter_receiver(settings: Settings) -> Callable[..., None]:
    """Return a receiver of Celery's signals `task_unknown` and `task_rejected`."""

    def receive(message: Any = None, exc: Any = None, name: Any = None, **_: Any) -> None:
        queue = str((message.delivery_info or {}).get("routing_key"))[:_SHOWN]
        why = f"this worker has no task {name!r}" if name is not None else _why(exc)
        made = entry(_shown(message), why[:_SHOWN], queue)
        log.warning("a message of queue %s was put aside: %s", queue, why[:_SHOWN])
        if isinstance(message.channel, AckBufferChannel):
            message.channel.add_dead_letter(made)
            return
        try:
            asyncio.run(_keep(settings, made))
        except (AgentException, OSError) as error:
            log.warning("it is lost, as the store is away: %s", error)

    return receive


async def _keep(settings: Settings, made: bytes) -> None:
    quick = settings.model_copy(update={"patience": _PATIENCE_SECONDS})
    store = await open_store(quick, client_app(quick))
    try:
        await keep_aside(store.connection, made, store.keys)
    finally:
        await store.aclose()


def _why(exc: Any) -> str:
    return "the message asks for no task" if exc is None else f"Celery could not take it: {exc}"


def _shown(message: Any) -> bytes:
    shown: str = saferepr({"headers": message.headers, "body": message.body}, maxlen=KEPT_BYTES)
    return shown.encode("ascii", "backslashreplace")


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
    give_threads(app)
    if theirs:
        rule = "their messages must be signed" if gate else "anybody who can publish may start them"
        log.info("this worker takes tasks beside the fleet's (%s): %s", rule, ", ".join(theirs))


def give_threads(app: Celery) -> None:
    """Let the tasks of the app's user run beside the event loop, where the pool has one."""
    for name, task in app.tasks.items():
        if name not in (TASK, TOOL_TASK) and not name.startswith(CELERYS):
            give_thread(task)


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
