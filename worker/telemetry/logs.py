"""Log lines, as text or as JSON with the ids of their step; no line has a secret.

Text lines keep the formats that Celery has set up.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import orjson
from celery import signals

from stepfleet.orchestrator.events.envelope import Events, stamp
from stepfleet.orchestrator.protocol.claim import Claim, Committed, Refusal
from stepfleet.orchestrator.protocol.verdict import Move, Verdict
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.records.run.report import described
from stepfleet.orchestrator.records.run.trace import one_line
from stepfleet.orchestrator.records.text.redaction import redact
from stepfleet.orchestrator.settings.settings import TASK, TOOL_TASK
from stepfleet.worker.ports import StepObserver


@dataclass(frozen=True, slots=True)
class Identity:
    """A step of a run (from 1), its agent where it is claimed, and the Celery task."""

    run_id: str
    step: int
    agent: str = ""
    task_id: str = ""


_current: ContextVar[Identity | None] = ContextVar("stepfleet_step", default=None)


def current_step() -> Identity | None:
    """Return the step that this code works for; None outside of steps."""
    return _current.get()


def enter_task(
    name: str, task_id: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> None:
    """Set the step of a Celery task; a task of another kind, or without a step, has none."""
    given = [*args, *(kwargs or {}).values()]
    if name not in (TASK, TOOL_TASK) or len(given) < 2:  # noqa: PLR2004 - a run and a step
        _current.set(None)
        return
    run_id, step = given[:2]
    known = isinstance(run_id, str) and isinstance(step, int)
    _current.set(Identity(run_id, step + 1, task_id=task_id) if known else None)


def enter_step(claim: Claim) -> None:
    """Set the step that was claimed, and its agent."""
    known = _current.get()
    if known is None or known.run_id != claim.run_id:
        known = Identity(claim.run_id, claim.number)
    _current.set(replace(known, step=claim.number, agent=claim.config.name))


_nodes: dict[int | None, str] = {}
"""This worker's process id and name; the name of a pool's child has the child's id after it."""
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "data"}
"""Attributes of every record; all others come from `extra`."""


class JsonLines(logging.Formatter):
    """Formats a record as one line: time, level, message, ids, worker, `extra`, exception."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._environment = dict(os.environ if environment is None else environment)

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without a line break."""
        line: dict[str, Any] = {
            "time": stamp(datetime.fromtimestamp(record.created, UTC)),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_ids(record),
            "worker": _nodes.get(record.process)
            or ":".join([*_nodes.values(), f"{record.process}"]),
            **{name: value for name, value in vars(record).items() if name not in _OWN},
        }
        if record.exc_text:  # that of user code, without our frames, comes so
            line["exception"] = record.exc_text
        elif record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        plain = {name: self._plain(value) for name, value in line.items()}
        text = exact_json.text(plain, default=repr, option=orjson.OPT_NON_STR_KEYS)
        return redact(text, self._environment)

    def _plain(self, value: Any) -> Any:
        """Return a text without secrets, before quotes are escaped, in a form that UTF-8 has."""
        if not isinstance(value, str):
            return value
        return redact(value, self._environment).encode(errors="replace").decode()


class CleanLines(logging.Formatter):
    """Formats a record by another formatter, tracebacks included, and takes the secrets out."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without secrets."""
        return redact(self._inner.format(record))


def log_as_json() -> None:
    """Let the workers of this process log lines of JSON with the ids of their steps."""
    setup = {signals.after_setup_logger: _format, signals.after_setup_task_logger: _format}
    for signal, do in {**setup, signals.task_prerun: _enter, signals.celeryd_init: _name}.items():
        signal.connect(do, weak=False, dispatch_uid="stepfleet-json")


def log_without_secrets() -> None:
    """Let the workers of this process log lines of text without secrets."""
    signals.after_setup_logger.connect(_clean, weak=False, dispatch_uid="stepfleet-clean")
    signals.after_setup_task_logger.connect(_clean, weak=False, dispatch_uid="stepfleet-clean")


def _format(logger: logging.Logger, **_: Any) -> None:
    for handler in logger.handlers:
        handler.setFormatter(JsonLines())


def _clean(logger: logging.Logger, **_: Any) -> None:
    for handler in logger.handlers:
        if not isinstance(handler.formatter, CleanLines):
            handler.setFormatter(CleanLines(handler.formatter or logging.Formatter()))


def _enter(task_id: str, task: Any, args: Any, kwargs: Any, **_: Any) -> None:
    known = _current.get()
    if known is None or known.task_id != task_id:  # a step that has failed is told of again
        enter_task(task.name, task_id, args or (), kwargs)


def _name(sender: str, **_: Any) -> None:
    _nodes[os.getpid()] = sender


def _ids(record: logging.LogRecord) -> dict[str, Any]:
    """Return the ids that are known: of the step at hand, or of the task in a line of Celery."""
    step = current_step()
    if step is None:
        data = getattr(record, "data", None)
        return {"task_id": data["id"]} if isinstance(data, dict) and "id" in data else {}
    ids = {"run_id": step.run_id, "step": step.step, "agent": step.agent, "task_id": step.task_id}
    return {name: value for name, value in ids.items() if value}


log = logging.getLogger("stepfleet.steps")


def step_logger(*, as_json: bool) -> tuple[StepObserver, ...]:
    """Return what logs commits, or nothing where nobody reads the lines.

    Lines of JSON are of level INFO, so that a filter by run shows the whole run; text is DEBUG.
    """
    level = logging.INFO if as_json else logging.DEBUG
    return (StepLogger(level),) if log.isEnabledFor(level) else ()


class StepLogger(StepObserver):
    """Logs each commit that is applied with `level`."""

    def __init__(self, level: int) -> None:
        self._level = level

    def claimed(self, claim: Claim | Refusal) -> None:
        """Note whose step it is, for all lines that are logged in it."""
        if isinstance(claim, Claim):
            enter_step(claim)

    def committed(
        self, claim: Claim, verdict: Verdict, events: Events, committed: Committed
    ) -> None:
        """Log what was committed."""
        del events
        if not committed.applied:
            return
        try:
            for line in lines_of(claim, verdict):
                text = redact(line)
                log.log(self._level, "%s %s %s", claim.config.name, claim.run_id, text)
        except Exception:
            # What is committed stays so, whatever the log gets of it.
            log.exception("a step of run %s could not be logged", claim.run_id)


def lines_of(claim: Claim, verdict: Verdict) -> Iterator[str]:
    """Yield the lines of a commit: the step, and what becomes of the run."""
    if verdict.logged:
        yield described(verdict.logged.result)
    match verdict.move:
        case Move.RETRY:
            why = f": {one_line(verdict.failure.message)}" if verdict.failure else ""
            attempt = claim.attempts + claim.limited + 2
            yield f"step {claim.number}: attempt {attempt} in {verdict.delay:.1f} s{why}"
        case Move.RELEASE:
            yield f"step {claim.number}: handed back"
        case Move.WAIT:
            yield f"step {claim.number}: waits for its tool calls"
        case Move.FINISH:
            why = f": {one_line(verdict.error)}" if verdict.error else ""
            yield f"ended after {verdict.state.session_steps} steps: {verdict.stop_reason}{why}"
        case Move.CONTINUE:
            pass
