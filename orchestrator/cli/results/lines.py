"""The line of a run in a results file, and which run and which end of it a line is of. Pure."""

import re
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple
from uuid import UUID

from stepfleet.orchestrator.batches.files.openai_format import to_openai_line
from stepfleet.orchestrator.batches.files.tables import cells, select
from stepfleet.orchestrator.batches.results import as_line, full, slim
from stepfleet.orchestrator.cli.results.layout import Layout
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.records.run.results import AgentRunResult

_selected = lru_cache(maxsize=1)(select)
_ID = re.compile(rb'\{"id":"(?:[^"\\]|\\.)*\\?', re.DOTALL)
_BEHIND_ID = b'","run_id":"'
_OPENAI_BEGINNING = b'{"id":"batch_req_'
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
    return as_line(make(result) if make else cells(result, _selected(layout.fields)))


def mark_of(line: bytes, layout: Layout) -> Mark | None:
    """Return the mark of a line that was written before; None where it is no such line."""
    try:
        data = exact_json.loads(line)
    except ValueError:
        return None
    if not isinstance(data, dict):
        return None
    return _openai_mark(data) if layout.kind == "openai" else _own_mark(data, layout)


def is_begun(cut: bytes, layout: Layout) -> bool:
    """Return whether a line without its end is the beginning of one that `to_line` makes."""
    if layout.kind == "openai":
        return _agree(cut, _OPENAI_BEGINNING)
    own = _ID.match(cut)
    return _agree(cut[own.end() :], _BEHIND_ID) if own else _agree(cut, b'{"id":"')


def _agree(one: bytes, other: bytes) -> bool:
    return one.startswith(other) or other.startswith(one)


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
