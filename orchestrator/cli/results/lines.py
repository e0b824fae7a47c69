"""The line of a run in a results file, and which run and which end of it a line is of. Pure."""

import re
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple
from uuid import UUID

import orjson
from pydantic.alias_generators import to_snake

from stepfleet.orchestrator.batches.openai_format import to_openai_line
from stepfleet.orchestrator.batches.tables.fields import as_json, cells, select
from stepfleet.orchestrator.cli.results.layout import Layout
from stepfleet.orchestrator.records.run.results import AgentRunResult

_selected = lru_cache(maxsize=1)(select)
_OPENAI_ID = re.compile(r"batch_req_([0-9a-f]{32})(?:_([0-9a-f]{1,16}))?")


class Mark(NamedTuple):
    """The run of a line, and the end of the run that the line is of.

    `ended` is None where the line does not have it, or is of another layout: it is stale then.
    """

    run_id: str
    ended: datetime | None


def to_line(result: AgentRunResult, layout: Layout) -> bytes:
    """Return the line of a run, with its line break."""
    makers = {"openai": to_openai_line, "slim": slim, "full": full}
    make = makers.get(layout.kind)
    data = make(result) if make else cells(result, _selected(layout.fields))
    try:
        return orjson.dumps(data, default=str) + b"\n"
    except TypeError:  # integers beyond 64 bits, lone surrogates
        return as_json(data).encode("utf-8", "replace") + b"\n"


def full(result: AgentRunResult) -> dict[str, Any]:
    """Return all fields of a result, the line's own id first; all names are in snake_case."""
    data = result.to_dict()
    for one in (data["outcome"] or {}).get("evaluations", ()):
        one["context"] = {to_snake(name): value for name, value in one["context"].items()}
    return {"id": result.line_id or result.run_id, **data}


def slim(result: AgentRunResult) -> dict[str, Any]:
    """Return the answer, why the run stopped, what it cost, and its error, if there was one."""
    answer = "output" if result.structured is None else "structured"
    names = ("run_id", "status", "stop_reason", answer, "cost_usd", "end_time")
    data = result.model_dump(mode="json", include=set(names))
    line = {"id": result.line_id or result.run_id, **{name: data[name] for name in names}}
    if error := result.error or (result.last_error and str(result.last_error)):
        line["error"] = error
    return line


def mark_of(line: bytes, layout: Layout) -> Mark | None:
    """Return the mark of a line that was written before; None where it is no such line."""
    try:
        data = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(data, dict):
        return None
    return _openai_mark(data) if layout.kind == "openai" else _own_mark(data, layout)


def _own_mark(data: dict[str, Any], layout: Layout) -> Mark | None:
    run_id, ended = data.get("run_id"), data.get("end_time")
    if not isinstance(run_id, str):
        return None
    is_same = ("steps" in data) == (layout.kind == "full")
    if not is_same or "shouldContinue" in (data.get("outcome") or {}):  # by an earlier version
        return Mark(run_id, None)
    try:
        return Mark(run_id, datetime.fromisoformat(ended) if ended else None)
    except (TypeError, ValueError):
        return Mark(run_id, None)


def _openai_mark(data: dict[str, Any]) -> Mark | None:
    found = _OPENAI_ID.fullmatch(str(data.get("id")))
    if found is None or "custom_id" not in data:
        return None
    run, ended = found.groups()
    moment = datetime.fromtimestamp(int(ended, 16) / 1000, UTC) if ended else None
    return Mark(str(UUID(run)), moment)
