"""The fields of a result, and those that somebody selects: `id,structured.*,cost_usd`. Pure."""

import json
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any, Literal

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.run.results import AgentRunResult

Kind = Literal["text", "integer", "number", "boolean", "time", "data"]
"""The type of a field; `data` is any JSON, `time` ISO 8601 in UTC."""

DEFAULT_FIELDS = (
    *("id", "run_id", "status", "stop_reason", "output", "structured.*", "error"),
    *("last_error.message", "cost_usd", "steps_used", "usage.total_tokens"),
    *("start_time", "end_time", "duration_seconds"),
)
"""The columns of a table for which nobody has selected any."""
_KINDS: tuple[tuple[type, Kind], ...] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "text"),
    (datetime, "time"),
)


@dataclass(frozen=True, slots=True)
class Field:
    """One selected field: `root`, or the part of its data at `path`; `spread` is a final `.*`."""

    root: str
    path: str = ""
    spread: bool = False

    @property
    def name(self) -> str:
        """The field's column, or the beginning of its columns' names."""
        return f"{self.root}.{self.path}" if self.path else self.root


@cache
def kinds() -> Mapping[str, Kind]:
    """Return the type of each field of a result line, in the line's order."""
    fields = {name: one.annotation for name, one in AgentRunResult.model_fields.items()}
    computed = AgentRunResult.model_computed_fields
    fields |= {name: one.return_type for name, one in computed.items()}
    return {"id": "text", **{name: _kind(hint) for name, hint in fields.items()}}


def select(names: str | Iterable[str] | None) -> tuple[Field, ...]:
    """Return the fields of a list of names, or of a text with commas; None is the usual columns.

    Raises `ConfigurationError` that names the field and the fix.
    """
    given = names.split(",") if isinstance(names, str) else names
    parts = [name.strip() for name in (DEFAULT_FIELDS if given is None else given)]
    fields = tuple(dict.fromkeys(_field(name) for name in parts if name))
    if not fields:
        raise ConfigurationError("fields: none is named; write some, as id,structured.*,cost_usd")
    return fields


def cells(result: AgentRunResult, fields: Sequence[Field]) -> dict[str, Any]:
    """Return the values of a result's selected fields (JSON data), by column."""
    roots = {one.root for one in fields}
    data = result.model_dump(mode="json", by_alias=False, include=roots)
    data["id"] = result.line_id or result.run_id
    found: dict[str, Any] = {}
    for one in fields:
        value = data.get(one.root)
        if one.path:
            value = _at(value, one.path)
        if not one.spread:
            found[one.name] = value
        elif isinstance(value, dict):
            for key, item in value.items():
                found.setdefault(f"{one.name}.{key}", item)
        elif value is not None:  # data that is no object: a list, a number
            found.setdefault(one.name, value)
    return found


def columns(fields: Sequence[Field], seen: Iterable[str]) -> list[str]:
    """Return the columns of a table, in the order of `fields`; `seen` are those of its rows."""
    found: dict[str, None] = {}
    seen = list(seen)
    for one in fields:
        if one.spread:
            below = f"{one.name}."
            named = (name for name in seen if name == one.name or name.startswith(below))
            found |= dict.fromkeys(named)
        else:
            found[one.name] = None
    return list(found)


def as_json(value: Any) -> str:
    """Return data as JSON text; integers of any size stay exact."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)


def _field(text: str) -> Field:
    root, _, path = text.partition(".")
    spread = path == "*" or path.endswith(".*")
    path = path[:-1].removesuffix(".") if spread else path
    known = kinds()
    if root not in known or "*" in path or text.endswith("."):
        msg = f"fields: {text!r} is no field of a result; there are {', '.join(known)}"
        if root not in known and "*" not in text:
            msg += f"; a part of the answer's data is structured.{text}"
        raise ConfigurationError(msg)
    if (path or spread) and known[root] != "data":
        msg = f"fields: {text!r}: {root} is {known[root]}, it has no parts; write {root}"
        raise ConfigurationError(msg)
    return Field(root, path, spread)


def _at(value: Any, path: str) -> Any:
    """Return the part of JSON data at a dotted path; None where there is none."""
    while isinstance(value, dict):
        if path in value:  # also a key that has dots
            return value[path]
        head, _, path = path.partition(".")
        value = value.get(head) if path else None
    return None


def _kind(hint: Any) -> Kind:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (hint, *more) = (one for one in typing.get_args(hint) if one is not type(None))
        if more:
            return "data"
    if not isinstance(hint, type):
        return "data"
    return next((kind for base, kind in _KINDS if issubclass(hint, base)), "data")
