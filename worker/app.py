"""The Celery app of workers: `celery -A stepfleet.worker.app worker`.

Made from the settings when Celery first asks for `app`; importing this module does nothing.
"""

import logging
import os
import sys
from collections.abc import Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any

from celery import Celery, bootsteps, signals
from celery.worker.control import control_command

from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.records.text.redaction import keep_secret
from stepfleet.orchestrator.settings.own_app import AGENTS as APP_AGENTS
from stepfleet.orchestrator.settings.own_app import app_settings, check_addresses
from stepfleet.orchestrator.settings.settings import TASK, TOOL_TASK, Settings, load_settings
from stepfleet.orchestrator.store.dispatch import celery_app
from stepfleet.orchestrator.store.keys import QUARANTINE
from stepfleet.worker.engine.bridge import end_home, explain_ends
from stepfleet.worker.engine.messages import SignatureCheck
from stepfleet.worker.engine.other_tasks import dead_letter_receiver, give_threads, limit_tasks
from stepfleet.worker.engine.pool import refuse_greenlet_pools
from stepfleet.worker.engine.transport import EVENTS, batch_url
from stepfleet.worker.engine.transport import register as register_transport
from stepfleet.worker.runtime.child_deaths import Requests, counts_lost_children
from stepfleet.worker.runtime.process import WorkerProcess
from stepfleet.worker.runtime.shutdown import Stopping, drain_at_hangup, ignore_hangup
from stepfleet.worker.tasks import PROMISED, put_aside, register
from stepfleet.worker.telemetry import log_as_json, log_without_secrets

log = logging.getLogger(__name__)

POOL = "stepfleet.worker.engine.pool:Pool"
CONSUMER = "stepfleet.worker.engine.consumer:ResilientConsumer"
CELERYS_CONSUMER = "celery.worker.consumer:Consumer"
SHORT_SECONDS = 120.0
"""A time limit below this ends model calls that are within their own."""
READY_SECONDS = 5.0
"""A worker is ready when its agents are announced, or this long after it could have been."""
AGENTS = "STEPFLEET_AGENTS"


def __getattr__(name: str) -> Any:
    if name in ("app", "celery"):
        return worker_app()
    raise AttributeError(name)


@cache
def worker_app() -> Celery:
    """Return the app for the settings and agents that the environment names."""
    return create_app(load_settings())


def create_app(settings: Settings) -> Celery:
    """Return a worker's app. Raises `ConfigurationError` when settings or agents are wrong."""
    prefork = asks_for_prefork(sys.argv)
    app = celery_app(
        settings,
        worker_pool="prefork" if prefork else POOL,
        worker_consumer=CONSUMER,
        worker_concurrency=None if prefork else settings.slots,
        worker_prefetch_multiplier=1,
        worker_send_task_events=True,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        broker_channel_error_retry=True,
        task_acks_late=True,
        task_track_started=True,
        # Recovery is the rescuer's; kombu's own must not bring a message back during a long step.
        broker_transport_options={
            "visibility_timeout": 6 * 3600,
            "message_limit": settings.message_bytes,
            "quarantine": settings.prefix + QUARANTINE,
        },
        worker_hijack_root_logger=True,
    )
    if settings.transport == "batch":
        register_transport()
        app.conf.broker_url = batch_url(settings.broker)
        app.conf.event_serializer = EVENTS
    references = [one for one in os.environ.get(AGENTS, "").split(",") if one]
    process = WorkerProcess(settings, load_agents(references).values(), app, isolates=not prefork)
    if settings.log_format == "json":
        log_as_json()
    else:
        log_without_secrets()
    receive = dead_letter_receiver(settings)
    signals.task_unknown.connect(receive, weak=False)
    signals.task_rejected.connect(receive, weak=False)
    gate = _add_tasks(app, settings, process)

    def set_up(**_: Any) -> None:
        limit_tasks(app, gate, partial(put_aside, process))

    signals.worker_init.connect(refuse_greenlet_pools, weak=False)
    signals.worker_init.connect(lambda **_: process.open(), weak=False)
    signals.celeryd_after_setup.connect(set_up, weak=False)
    signals.worker_ready.connect(lambda **_: drain_at_hangup(), weak=False)
    if prefork:
        signals.worker_process_init.connect(lambda **_: ignore_hangup(), weak=False)
        _count_lost_children(settings, process)
    _follow_worker(app, process)
    return app


def check_broker(app: Celery) -> None:
    """Raise `SystemExit` where the broker's address of a user's app is unusable."""
    try:
        check_addresses(app)
    except AgentException as error:
        raise SystemExit(f"stepfleet: {error}") from None


def serve_on(app: Celery, worker: Any) -> None:
    """Let a worker of a user's app do steps, if it reads a queue of theirs, before it starts.

    Its configuration, its logging and its other tasks stay as they are. Raises `SystemExit` with
    the reason where it cannot, as Celery only logs other exceptions of receivers.
    """
    try:
        settings, references = app_settings(app), app.conf.get(APP_AGENTS) or os.environ.get(AGENTS)
        agents = load_agents(references or ()).values()
    except AgentException as error:
        raise SystemExit(f"stepfleet: {error}") from None
    needed = {settings.queue, *(queue for agent in agents for queue in agent.queues)}
    if needed.isdisjoint(app.amqp.queues.consume_from):
        said = "no steps run here: this worker does not read " + ", ".join(sorted(needed))
        signals.worker_ready.connect(lambda **_: log.info(said), weak=False)
        return
    refuse_greenlet_pools(worker)
    # Isolated processes read it.
    named = references if isinstance(references, str) else ",".join(references or ())
    os.environ.update({**settings.environment(), AGENTS: named})
    prefork = "prefork" in str(worker.pool_cls)
    process = WorkerProcess(settings, agents, app, isolates=not prefork, leave=_left_to_celery)
    log_without_secrets()
    _add_tasks(app, settings, process)
    if prefork:
        _count_lost_children(settings, process)
    elif str(worker.pool_cls) == POOL and worker.consumer_cls == CELERYS_CONSUMER:
        worker.consumer_cls = CONSUMER
    process.open()

    def check(**_: Any) -> None:  # Celery's logging is set up, and annotations are applied
        _warn_of_limits(worker)
        _check_tasks(app)
        give_threads(app)

    signals.celeryd_after_setup.connect(check, weak=False)
    _follow_worker(app, process)


def _left_to_celery(seconds: float) -> None:
    """Leave the worker's end to Celery: tasks of the user's may run for longer than steps may."""
    log.warning("tasks still run %g s after the request to stop; Celery waits for them", seconds)


def _warn_of_limits(worker: Any) -> None:
    for name in ("time_limit", "soft_time_limit"):
        seconds = getattr(worker, name, None)
        if seconds and seconds < SHORT_SECONDS:
            log.warning(
                "task_%s=%g ends steps as well, though a model's call may take %g s: raise it, or"
                " start another worker for their queue with --%s",
                *(name, seconds, SHORT_SECONDS, name.replace("_", "-")),
            )


def _check_tasks(app: Celery) -> None:
    """Raise `SystemExit` where annotations of the app changed a promise of our tasks."""
    for task in (app.tasks[TASK], app.tasks[TOOL_TASK]):
        for option, value in PROMISED.items():
            if getattr(task, option) != value:
                raise SystemExit(
                    f"stepfleet: task_annotations of the Celery app set {option} of {task.name};"
                    f" steps need {option}={value!r}: except them"
                )


def _add_tasks(app: Celery, settings: Settings, process: WorkerProcess) -> SignatureCheck | None:
    """Register the tasks; return what checks signatures, where messages are signed."""
    for name, value in settings.secrets():
        keep_secret(name, value)
    keys = settings.signing
    gate = SignatureCheck(keys, lambda: app.amqp.queues.consume_from) if keys else None
    register(app, process, gate)
    return gate


def _count_lost_children(settings: Settings, process: WorkerProcess) -> None:
    requests = Requests()
    signals.task_received.connect(requests, weak=False)
    lost = counts_lost_children(
        settings, lambda: process.stopping.has_begun, requests, lambda: process.node
    )
    signals.task_failure.connect(lost, weak=False)


def asks_for_prefork(arguments: Sequence[str]) -> bool:
    """Return whether a command line names the pool prefork.

    Celery takes `--pool prefork` for its own default, and then prefers the configured pool.
    """
    named = pairwise(arguments)
    if any(option in ("-P", "--pool") and value == "prefork" for option, value in named):
        return True
    return "--pool=prefork" in arguments or "-Pprefork" in arguments


def _drain_step(stopping: Stopping) -> type[bootsteps.StartStopStep]:
    """Return a step that begins the drain for every kind of stop, by remote control too."""

    class DrainStep(bootsteps.StartStopStep):
        requires = ("celery.worker.components:Pool",)

        def close(self, parent: Any) -> None:
            del parent
            stopping.begin()

        def terminate(self, parent: Any) -> None:
            del parent
            stopping.hurry()

    return DrainStep


def _follow_worker(app: Celery, process: WorkerProcess) -> None:
    """Tie the process to Celery's worker. Receivers are kept by the app's own process."""

    def starts_in_worker(sender: Any = None, **_: Any) -> None:
        if "prefork" not in str(getattr(sender, "pool", None)):
            process.start()
        process.wait_until_known(READY_SECONDS)  # Celery logs "ready" after this

    def set_up(instance: Any = None, **_: Any) -> None:
        process.limits.note(instance)
        process.belong_to(instance)
        if "prefork" in str(instance.pool_cls):
            explain_ends(process.stopping.why_ended)

    def stops(how: str = "Warm", **_: Any) -> None:
        process.stopping.request(at_once=how != "Warm")

    signals.celeryd_after_setup.connect(set_up, weak=False)
    signals.worker_process_init.connect(lambda **_: process.start(), weak=False)
    signals.worker_process_shutdown.connect(lambda **_: end_home(), weak=False)
    signals.worker_ready.connect(starts_in_worker, weak=False)
    signals.worker_shutting_down.connect(stops, weak=False)
    app.steps["worker"].add(_drain_step(process.stopping))
    _take_interruptions(process)


def _take_interruptions(process: WorkerProcess) -> None:
    """Let clients interrupt what is cancelled: one run, or a whole batch."""

    def interrupt(state: Any, run_id: str = "", batch_id: str = "") -> dict[str, str]:
        del state
        process.interrupt(run_id, batch_id)
        return {"ok": run_id or batch_id}

    for name, of in (("stepfleet_interrupt", "run_id"), ("stepfleet_interrupt_batch", "batch_id")):
        control_command(name=name, args=[(of, str)], signature=of.upper())(interrupt)
