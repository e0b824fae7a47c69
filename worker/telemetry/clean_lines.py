"""Log lines as text, without the secrets of the environment, whoever wrote them.

Wraps the formats that Celery has set up; lines of JSON are clean by themselves (`json_lines`).
"""

import logging
from typing import Any

from celery import signals

from stepfleet.orchestrator.records.text.redaction import redact


class CleanLines(logging.Formatter):
    """Formats a record by another formatter, tracebacks included, and takes the secrets out."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without secrets."""
        return redact(self._inner.format(record))


def log_without_secrets() -> None:
    """Let the workers of this process log so."""
    signals.after_setup_logger.connect(_clean, weak=False, dispatch_uid="stepfleet-clean")
    signals.after_setup_task_logger.connect(_clean, weak=False, dispatch_uid="stepfleet-clean")


def _clean(logger: logging.Logger, **_: Any) -> None:
    for handler in logger.handlers:
        if not isinstance(handler.formatter, CleanLines):
            handler.setFormatter(CleanLines(handler.formatter or logging.Formatter()))
