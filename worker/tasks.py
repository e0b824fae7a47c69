"""The Celery tasks of steps and tool calls: thin. Their outcome is what Flower shows."""

import logging
from collections.abc import Coroutine
from functools import partial
from typing import Any

from billiard.einfo import ExceptionWithTraceback
from celery import Celery, Task
from celery.exceptions import Reject, Retry
from celery.utils.saferepr import saferepr

from stepfleet.orchestrator.errors import AgentException, StoreError
from stepfleet.orchestrator.protocol.claim import Refusal, Refused
from stepfleet.orchestrator.protocol.verdict import Move, Verdict
from stepfleet.orchestrator.settings.settings import TASK, TOOL_TASK
from stepfleet.orchestrator.store.fleet.quarantine import KEPT_BYTES, entry
from stepfleet.worker.engine.bridge import await_
from stepfleet.worker.engine.messages import (
    Headers,
    Inadmissible,
    SignatureCheck,
    check_limits,
    work_in,
)
from stepfleet.worker.engine.pool.direct import WaitingTask
from stepfleet.worker.runtime.process import WorkerProcess
from stepfleet.worker.step import Report

log = logging.getLogger(__name__)
_unread: set[str] = set()
"""Why this process could not read runs, as far as it has warned of it."""

SHOWN = 300
MOST_REASONS = 100
ISOLATED = "executed in an isolated process"
TRACER_LOG = "celery.app.trace"
STOPPING = "the worker is stopping"

PROMISED: dict[str, Any] = {
    "acks_late": True,
    "acks_on_failure": True,
    "acks_on_timeout": True,
    "reject_on_worker_lost": False,
    "retry_on_worker_lost": False,
    "ignore_result": True,
    "store_errors_even_if_ignored": False,
}
"""Options of both tasks, whatever the defaults of a user's app are: recovery is the rescuer's."""


class StepFailed(Exception):  # noqa: N818 - reads as what happened
    """A step was committed as failed; its run goes on or ends as the error policy says.

    `where` is the traceback of the user's code that failed, if any did.
    """

    def __init__(self, message: str, where: str | None = None) -> None:
        super().__init__(message)
        self.where = where


class CallFailed(StepFailed):
    """A tool call's error was delivered; the model reads it, or the error policy ends the run."""


class StepRetried(Retry):
    """A step will be retried after `when` seconds. Flower shows the `repr`."""

    where: str | None = None

    def __repr__(self) -> str:
        """Return the reason; Celery's own names neither the reason nor a unit."""
        return f"again in {self.when} s: {self.message}"


class WorkTask(WaitingTask):
    """The task of steps, or that of tool calls. Its traceback in Celery is that of user code."""

    process: WorkerProcess
    gate: SignatureCheck | None

    def begin(self, args: Any, kwargs: Any, message: Headers) -> Coroutine[Any, Any, Report]:
        """Return what does the work that a message asks for. Raises `Inadmissible`."""
        work = work_in(self.name, args, kwargs)
        if self.gate:
            self.gate.check(self.name, work.args, message)
        check_limits(message)
        return self.process.run(work)

    def end(self, answer: Report) -> str:
        """Return, or raise, what Celery shows."""
        self.process.crash("before-acknowledge")
        return outcome(answer)

    def perform(self, args: Any, kwargs: Any) -> str:
        """Do the work of the task's request, as a body of Celery's."""
        try:
            begun = self.begin(args, kwargs, self.request)
        except Inadmissible as refusal:
            raise put_aside(self.process, self, refusal) from None
        return self.end(await_(self.process.limits.keep(self, begun)))

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Replace the framework's traceback, which tells nobody what failed."""
        del exc, task_id, args, kwargs
        show_users_code(einfo)

    def on_retry(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Do the same for a step that is retried."""
        del exc, task_id, args, kwargs
        show_users_code(einfo)


def show_users_code(einfo: Any) -> None:
    """Let a task's traceback be that of the user's code, where it is of a failed step.

    Our own errors say what to do; where they were raised tells nobody more.
    """
    raised = getattr(einfo, "exception", None)  # Celery has none for a task that was cancelled
    if isinstance(raised, ExceptionWithTraceback):
        raised = raised.exc
    if isinstance(raised, StepFailed | StepRetried | AgentException):
        where = getattr(raised, "where", None)
        einfo.traceback = where or f"{raised} (no code of the agent raised it)"


def register(app: Celery, process: WorkerProcess, gate: SignatureCheck | None = None) -> None:
    """Give `app` the tasks of steps and of tool calls. `gate` checks signatures."""
    logging.getLogger(TRACER_LOG).addFilter(is_worth_logging)

    options = {**PROMISED, "serializer": "json", "rate_limit": 0, "process": process, "gate": gate}
    made = partial(app.task, base=WorkTask, bind=True, **options)

    @made(name=TASK, throws=(StepFailed,))
    def step(self: WorkTask, *args: Any, **kwargs: Any) -> str:
        """Do one step of a run: `(run_id, step)` is a hint, Redis holds the truth."""
        return self.perform(args, kwargs)

    @made(name=TOOL_TASK, throws=(CallFailed,))
    def call(self: WorkTask, *args: Any, **kwargs: Any) -> str:
        """Make one tool call of a step: a hint too; run and arguments are in Redis."""
        return self.perform(args, kwargs)


def is_worth_logging(record: logging.LogRecord) -> bool:
    """Tell whether to keep a log record of Celery's tracer.

    A message that a stopping worker puts back is none: Celery adds a traceback to each.
    """
    raised = record.exc_info[1] if record.exc_info else None
    return not (isinstance(raised, Reject) and raised.reason == STOPPING)


def outcome(report: Report) -> str:
    """Return what Celery shows as the task's result.

    Raises `StepFailed` for a failed step, `StepRetried` for one that is retried later, `CallFailed`
    for a failed tool call, and `Reject` to put a message back that a stopping worker does not take.
    """
    if report.refusal:
        return _refused(report.work.run_id, report.refusal)
    if report.isolated:
        return ISOLATED
    return _step_outcome(report) if report.work.index is None else _call_outcome(report)


def _step_outcome(report: Report) -> str:
    verdict = report.verdict
    if verdict is None or not report.applied:
        return "dropped: another worker had taken over"
    if verdict.move is Move.RETRY:
        retried = StepRetried(_shown(verdict.failure), when=round(verdict.delay, 3))
        retried.where = where_failed(verdict)
        raise retried
    if verdict.failure is not None:
        raise StepFailed(_shown(verdict.failure), where_failed(verdict))
    if verdict.error is not None:
        raise StepFailed(verdict.error[:SHOWN], where_failed(verdict))
    return str(verdict.stop_reason if verdict.move is Move.FINISH else verdict.move)


def where_failed(verdict: Verdict) -> str | None:
    """Return the traceback of what failed in a step, if code of the user's did."""
    result = verdict.logged.result if verdict.logged else None
    failures = [verdict.failure]
    if result:
        failures += [*result.errors, *(call.error for call in result.tool_calls)]
    found = [one.traceback for one in failures if one and one.traceback]
    if not found and verdict.outcome:
        found = [one.traceback for one in verdict.outcome.broken if one.traceback]
    return found[0] if found else None


def _call_outcome(report: Report) -> str:
    if report.attended:
        return "waits"
    if report.record is None:
        return "given back: the worker is stopping"
    if not report.applied:
        return "dropped: nobody waits for the result any more"
    if report.record.error is not None:
        raise CallFailed(_shown(report.record.error), report.record.error.traceback)
    return "delivered"


def _refused(run_id: str, refusal: Refusal) -> str:
    if refusal.why is Refused.DRAINING:
        raise Reject(STOPPING, requeue=True)
    if refusal.why is Refused.UNREADABLE:
        _tell_unread(run_id, refusal.detail)
    return f"dropped: {refusal.why}"


def _tell_unread(run_id: str, why: str) -> None:
    """Log that a run is left to others: a warning once for each reason, which all runs may have."""
    is_new = why not in _unread
    if len(_unread) >= MOST_REASONS:
        _unread.clear()
    _unread.add(why)
    level = logging.WARNING if is_new else logging.INFO
    log.log(level, "run %s is left to other workers: %s", run_id, why)


def _shown(failure: Any) -> str:
    """Return an error for people: its type and code, and a first part of the message."""
    return f"{failure.type}: {failure.message}"[:SHOWN] if failure else "failed"


def put_aside(process: WorkerProcess, task: Task, refusal: Inadmissible) -> Reject:
    """Quarantine a message that may not be acted on; return how Celery is to reject it."""
    request = task.request
    queue = str((request.delivery_info or {}).get("routing_key"))[:SHOWN]
    log.warning("a message of queue %s was put aside: %s", queue, refusal)
    shown = saferepr((task.name, request.args, request.kwargs), maxlen=KEPT_BYTES)
    raw = shown.encode("ascii", "backslashreplace")
    try:
        await_(process.put_aside(entry(raw, str(refusal), queue)))
    except StoreError as error:
        log.warning("it is lost, as the store is away: %s", error)
    return Reject(str(refusal), requeue=False)
