"""Log lines, as text or as JSON with the ids of their step; no line has a secret.

Text lines keep the formats that Celery has set up.
"""

import logging
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import orjson
from celery import signals

from stepfleet.orchestrator.events.envelope import stamp
from stepfleet.orchestrator.records.text.redaction import redact
from stepfleet.worker.telemetry.identity import current_step, enter_task

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "data"}
"""Attributes of every record; all others come from `extra`."""


class JsonLines(logging.Formatter):
    """Formats a record as one line: time, level, logger, message, ids, `extra`, exception."""

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
            "process": record.process,
            **{name: value for name, value in vars(record).items() if name not in _OWN},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        elif record.exc_text:
            line["exception"] = record.exc_text
        plain = {name: self._plain(value) for name, value in line.items()}
        text = orjson.dumps(plain, default=repr, option=orjson.OPT_NON_STR_KEYS).decode()
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
    signals.after_setup_logger.connect(_format, weak=False, dispatch_uid="stepfleet-json")
    signals.after_setup_task_logger.connect(_format, weak=False, dispatch_uid="stepfleet-json")
    signals.task_prerun.connect(_enter, weak=False, dispatch_uid="stepfleet-json")


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
    enter_task(task.name, task_id, args or (), kwargs)


def _ids(record: logging.LogRecord) -> dict[str, Any]:
    """Return the ids that are known: of the step at hand, or of the task in a line of Celery."""
    step = current_step()
    if step is None:
        data = getattr(record, "data", None)
        return {"task_id": data["id"]} if isinstance(data, dict) and "id" in data else {}
    ids = {"run_id": step.run_id, "step": step.step, "agent": step.agent, "task_id": step.task_id}
    return {name: value for name, value in ids.items() if value}
