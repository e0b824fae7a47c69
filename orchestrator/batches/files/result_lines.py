"""The line of a run in a file of results: in full, in short, or any data. Pure."""

from typing import Any

from pydantic.alias_generators import to_snake

from stepfleet.orchestrator.batches.files.tables.fields import as_json
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.records.run.results import AgentRunResult


def as_line(data: dict[str, Any]) -> bytes:
    """Return data as a line, with its line break."""
    try:
        return exact_json.dumps(data, default=str) + b"\n"
    except TypeError:  # integers beyond 64 bits, lone surrogates
        return as_json(data).encode("utf-8", "replace") + b"\n"


def full(result: AgentRunResult) -> dict[str, Any]:
    """Return all fields of a result, the line's own id first; all names are in snake_case."""
    data = result.to_dict()
    for one in (data["outcome"] or {}).get("evaluations", ()):
        one["context"] = {to_snake(name): value for name, value in one["context"].items()}
    return {"id": result.line_id or result.run_id, **data}


def slim(result: AgentRunResult) -> dict[str, Any]:
    """Return the answer, why the run stopped, what it cost, and its error, if there was one.

    `price_estimated` is there where the cost is by a default price, `usage_estimated` where tokens
    are counted here, and `finish_reason` where the answer was cut or filtered.
    """
    answer = "output" if result.structured is None else "structured"
    names = ("run_id", "status", "stop_reason", answer, "cost_usd", "end_time")
    data = result.model_dump(mode="json", include=set(names))
    line = {"id": result.line_id or result.run_id, **{name: data[name] for name in names}}
    if error := result.error or (result.last_error and str(result.last_error)):
        line["error"] = error
    if result.price_estimated:
        line["price_estimated"] = True
    if result.usage_estimated:
        line["usage_estimated"] = True
    if result.shortened:
        line["finish_reason"] = result.finish_reason
    return line
