"""A run's line in a results file, and which run a line belongs to."""

import sys

import orjson

from stepfleet.orchestrator.batches.openai_format import to_openai_line
from stepfleet.orchestrator.records.batch import BatchFormat
from stepfleet.orchestrator.records.run.results import AgentRunResult


def to_line(result: AgentRunResult, kind: BatchFormat) -> bytes:
    """Return the line of a run, with its line break; our own format begins with the line's id."""
    own = {"id": result.line_id or result.run_id}
    data = to_openai_line(result) if kind == "openai" else {**own, **result.to_dict()}
    return orjson.dumps(data, default=str) + b"\n"


def print_line(result: AgentRunResult, kind: BatchFormat) -> None:
    """Print the line of a run on standard output, at once."""
    sys.stdout.write(to_line(result, kind).decode())
    sys.stdout.flush()


def key_of(result: AgentRunResult, kind: BatchFormat) -> str:
    """Return the key that identifies the run's line in its batch."""
    if kind == "openai":
        return str(to_openai_line(result).get("custom_id"))
    return result.run_id


def key_in(line: bytes, kind: BatchFormat) -> str | None:
    """Return the key of a line that was written before; None where it is no such line."""
    try:
        data = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    name = "custom_id" if kind == "openai" else "run_id"
    key = data.get(name) if isinstance(data, dict) else None
    return key if isinstance(key, str) else None
