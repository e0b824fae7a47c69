"""A run's line in a results file, and which run a line belongs to. Pure."""

from typing import Any

import orjson

from stepfleet.orchestrator.batches.openai_format import to_openai_line
from stepfleet.orchestrator.records.batch import BatchFormat
from stepfleet.orchestrator.records.run.results import AgentRunResult


def to_line(result: AgentRunResult, kind: BatchFormat) -> bytes:
    """Return the line of a run, with its line break."""
    data = to_openai_line(result) if kind == "openai" else _own(result)
    return orjson.dumps(data, default=str) + b"\n"


def key_of(result: AgentRunResult, kind: BatchFormat) -> str:
    """Return what tells the run's line from all others of its batch."""
    if kind == "openai":
        return str(to_openai_line(result).get("custom_id"))
    return result.run_id


def key_in(line: bytes, kind: BatchFormat) -> str | None:
    """Return the key of a line that was written before; None where it is no such line."""
    try:
        data = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    key = (
        data.get("custom_id" if kind == "openai" else "run_id") if isinstance(data, dict) else None
    )
    return key if isinstance(key, str) else None


def _own(result: AgentRunResult) -> dict[str, Any]:
    """Return the result, with the input line's own id in front."""
    return {"id": result.line_id or result.run_id, **result.to_dict()}
