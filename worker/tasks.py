"""The Celery task of a step: thin. Tells Celery what became of it, so that Flower shows it."""

import logging
from typing import Any

from celery import Celery, Task
from celery.exceptions import Reject, Retry

from stepfleet.orchestrator.protocol.claim import Refused, StepHint
from stepfleet.orchestrator.protocol.verdict import Move
from stepfleet.orchestrator.settings import TASK
from stepfleet.worker.bridge import await_
from stepfleet.worker.services import Services
from stepfleet.worker.step import StepReport

log = logging.getLogger(__name__)

SHOWN = 300
TRACER_LOG = "celery.app.trace"


class StepFailed(Exception):  # noqa: N818 - reads as what happened
    """A step was committed as failed; its run goes on or ends as the error policy says."""


class StepRetried(Retry):
    """A step will be tried again after `when` seconds. Flower shows what `repr` says."""

    def __repr__(self) -> str:
        """Return the reason; Celery's own names neither the reason nor a unit."""
        return f"again in {self.when} s: {self.message}"


def register(app: Celery, services: Services) -> None:
    """Give `app` the step task."""
    logging.getLogger(TRACER_LOG).addFilter(is_worth_logging)

    @app.task(name=TASK, bind=True, acks_late=True, ignore_result=True, throws=(StepFailed,))
    def step(self: Task, run_id: str, step: int) -> str:
        """Do one step of a run: `(run_id, step)` is a hint, Redis holds the truth."""
        del self
        report = await_(services.run_step(_hint(run_id, step)))
        services.crash("before-acknowledge")
        return told(report)


def is_worth_logging(record: logging.LogRecord) -> bool:
    """Tell whether to keep a log record of Celery's tracer.

    A message that a stopping worker puts back is none: Celery would add a traceback to each.
    """
    raised = record.exc_info[1] if record.exc_info else None
    return not (isinstance(raised, Reject) and raised.requeue)


def told(report: StepReport) -> str:
    """Return what Celery shows as the task's result.

    Raises `StepFailed` for a failed step, `StepRetried` for one that is tried again later, and
    `Reject` to put a hint back that a stopping worker does not take.
    """
    if report.refusal:
        if report.refusal.why is Refused.DRAINING:
            raise Reject("the worker is stopping", requeue=True)
        return f"dropped: {report.refusal.why}"
    verdict = report.verdict
    if verdict is None or not report.applied:
        return "dropped: another worker had taken over"
    if verdict.move is Move.RETRY:
        raise StepRetried(_shown(verdict.failure), when=round(verdict.delay, 3))
    if verdict.failure is not None:
        raise StepFailed(_shown(verdict.failure))
    if verdict.error is not None:
        raise StepFailed(verdict.error[:SHOWN])
    if verdict.move is Move.FINISH:
        return str(verdict.stop_reason)
    return str(verdict.move)


def _shown(failure: Any) -> str:
    """Return an error for people: its type and code, and a first part of the message."""
    return f"{failure.type}: {failure.message}"[:SHOWN] if failure else "failed"


def _hint(run_id: Any, step: Any) -> StepHint:
    valid = isinstance(run_id, str) and 0 < len(run_id) <= 200  # noqa: PLR2004 - ids are short
    if not valid or not isinstance(step, int) or isinstance(step, bool) or step < 0:
        log.warning("a step message without a run id and a step was dropped")
        raise Reject("not a step hint", requeue=False)
    return StepHint(run_id, step)
