"""Log records as lines of JSON, with the ids of the step that they were written in.

Secrets of the environment are taken out of every line, whoever wrote it.
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
"""What every record has; whatever else it has was given as `extra`."""


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


def log_as_json() -> None:
    """Let the workers of this process log so; their steps' ids are known from then on."""
    signals.after_setup_logger.connect(_format, weak=False, dispatch_uid="stepfleet-json")
    signals.after_setup_task_logger.connect(_format, weak=False, dispatch_uid="stepfleet-json")
    signals.task_prerun.connect(_enter, weak=False, dispatch_uid="stepfleet-json")


def _format(logger: logging.Logger, **_: Any) -> None:
    for handler in logger.handlers:
        handler.setFormatter(JsonLines())


def _enter(task_id: str, task: Any, args: Any, kwargs: Any, **_: Any) -> None:
    enter_task(task.name, task_id, args or (), kwargs)


def _ids(record: logging.LogRecord) -> dict[str, Any]:
    """Return the ids that are known: of the step at hand, or the task that Celery speaks of."""
    step = current_step()
    if step is None:
        told = getattr(record, "data", None)
        return {"task_id": told["id"]} if isinstance(told, dict) and "id" in told else {}
    ids = {"run_id": step.run_id, "step": step.step, "agent": step.agent, "task_id": step.task_id}
    return {name: value for name, value in ids.items() if value}
