"""Limits the tasks that a worker accepts besides its own two: Celery's, and the user's own.

Celery registers tasks in every app (`celery.group`, `celery.chord` and others). Their arguments
name tasks and queues, so a message for one makes a worker publish whatever a stranger wrote.
Decides by names; knows nothing of steps.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextvars import copy_context
from functools import wraps
from typing import Any

from celery import Celery, Task
from celery.exceptions import Reject
from celery.utils.saferepr import saferepr
from greenlet import getcurrent  # type: ignore[import-untyped]

from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.settings.settings import TASK, TOOL_TASK, Settings
from stepfleet.orchestrator.store.dispatch import client_app
from stepfleet.orchestrator.store.fleet.quarantine import KEPT_BYTES, entry, keep_aside
from stepfleet.orchestrator.store.store import open_store
from stepfleet.worker.engine.bridge import PerLoop, TaskGreenlet, await_
from stepfleet.worker.engine.messages import Inadmissible, SignatureCheck
from stepfleet.worker.engine.transport.ack_buffer import AckBufferChannel

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


def limit_tasks(app: Celery, gate: SignatureCheck | None, put_aside: PutAside) -> None:
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
        log.info("this worker also takes tasks of others (%s): %s", rule, ", ".join(theirs))


def give_threads(app: Celery) -> None:
    """Let the tasks of the app's user run off the event loop, where the pool has one."""
    for name, task in app.tasks.items():
        if name not in (TASK, TOOL_TASK) and not name.startswith(CELERYS):
            give_thread(task)


def _guard(task: Task, gate: SignatureCheck, put_aside: PutAside) -> None:
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
