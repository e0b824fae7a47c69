"""Says how a tool's outcome reads for the model. Pure."""

import json
from typing import Any

from stepfleet.orchestrator.records.errors import ErrorInfo
from stepfleet.orchestrator.records.tools import ToolCallRecord

ERROR_PREFIX = "Error: "


def result_text(record: ToolCallRecord) -> str:
    """Return the text of the tool message that answers the call.

    Text is given as it is, everything else as JSON; an error is `Error: ` and the JSON of
    `{"error": {"code", "message", "retryable"}}`.
    """
    if record.error is not None:
        return ERROR_PREFIX + value_text(error_data(record.error))
    return value_text(record.result)


def value_text(value: Any) -> str:
    """Return JSON data as text: a string as it is, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def error_data(error: ErrorInfo) -> dict[str, Any]:
    """Return what a model is told of a failure."""
    return {"error": {"code": error.code, "message": error.message, "retryable": error.retryable}}
