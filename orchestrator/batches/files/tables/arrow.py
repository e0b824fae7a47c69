"""Types of columns, and rows as Arrow's record batches. Needs pyarrow, which is an extra.

A result's own fields have fixed types. Parts of the answer's data have the type that all their
values share, or that their JSON Schema names; where they share none, they are JSON text.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from stepfleet.orchestrator.batches.files.tables.fields import as_json, kinds
from stepfleet.orchestrator.errors import ConfigurationError

if TYPE_CHECKING:
    import pyarrow as pa

MOST_PARTS = 200
"""Fields inside one column; data with more of them is written as JSON text."""
Rows = Callable[[], Iterator[list[dict[str, Any]]]]


def require_arrow(*more: str) -> None:
    """Raise `ConfigurationError`, with the fix, where pyarrow or `more` is not installed."""
    missing = [name for name in ("pyarrow", *more) if find_spec(name) is None]
    if missing:
        msg = (
            f"tables of this kind need {' and '.join(missing)}: pip install "
            '"stepfleet[tables]"; CSV and JSON lines need nothing'
        )
        raise ConfigurationError(msg)


def arrow_types(names: Sequence[str], declared: Mapping[str, Any], rows: Rows) -> "pa.Schema":
    """Return the columns' types; `declared` are JSON Schemas of the answers' properties.

    Reads the rows twice.
    """
    import pyarrow as pa  # noqa: PLC0415 - an extra

    fixed = {name: one for name in names if (one := _fixed(name)) is not None}
    found: dict[str, pa.DataType] = {
        name: _declared(declared.get(name.removeprefix("structured.")))
        for name in names
        if name not in fixed
    }
    text: set[str] = set()
    for group in rows():
        for name in found.keys() - text:
            try:
                here = pa.array([row.get(name) for row in group]).type
                found[name] = _merged(found[name], here)
            except (pa.ArrowException, OverflowError):
                text.add(name)
    # Numbers of one group may not fit the type that another one needs.
    for group in rows():
        for name in found.keys() - text:
            try:
                pa.array([row.get(name) for row in group], found[name])
            except (pa.ArrowException, OverflowError):
                text.add(name)
    kept = {name: _storable(one) for name, one in found.items() if name not in text}
    return pa.schema([(name, fixed.get(name) or kept.get(name) or pa.string()) for name in names])


def record_batch(schema: "pa.Schema", group: Sequence[Mapping[str, Any]]) -> "pa.RecordBatch":
    """Return rows as a record batch."""
    import pyarrow as pa  # noqa: PLC0415 - an extra

    arrays = []
    for field in schema:
        values = [row.get(field.name) for row in group]
        if pa.types.is_string(field.type):
            arrays.append(pa.array([_text(value) for value in values], field.type))
        elif pa.types.is_timestamp(field.type):
            arrays.append(pa.array(values, pa.string()).cast(field.type))
        else:
            arrays.append(pa.array(values, field.type))
    return pa.record_batch(arrays, schema=schema)


def _fixed(name: str) -> "pa.DataType | None":
    """Return the type of a column that is a field of a result; None for a part of its data."""
    import pyarrow as pa  # noqa: PLC0415 - an extra

    if name.startswith("usage."):
        return pa.int64()
    if name == "structured" or "." in name:
        return None
    known = {
        "integer": pa.int64(),
        "number": pa.float64(),
        "boolean": pa.bool_(),
        "time": pa.timestamp("us", "UTC"),
    }
    return known.get(kinds()[name], pa.string())


def _declared(schema: Any) -> "pa.DataType":
    """Return the type that a property's JSON Schema names, null where it is no plain one."""
    import pyarrow as pa  # noqa: PLC0415 - an extra

    given = schema if isinstance(schema, dict) else {}
    named = [one.get("type") for one in (given, *given.get("anyOf", ())) if isinstance(one, dict)]
    names = {one for one in named if isinstance(one, str)} - {"null"}
    known = {"number": pa.float64(), "integer": pa.int64(), "boolean": pa.bool_()}
    return known.get(names.pop(), pa.null()) if len(names) == 1 else pa.null()


def _merged(one: "pa.DataType", other: "pa.DataType") -> "pa.DataType":
    """Return the type of both; raises `pa.ArrowException` where there is none."""
    import pyarrow as pa  # noqa: PLC0415 - an extra

    if one == other or pa.types.is_null(other):
        return one
    pair = [pa.schema([("x", one)]), pa.schema([("x", other)])]
    merged = pa.unify_schemas(pair, promote_options="permissive").field(0).type
    if _parts(merged) > MOST_PARTS:
        raise pa.ArrowInvalid
    return merged


def _parts(kind: "pa.DataType") -> int:
    """Return how many fields a type has inside, at all depths."""
    return sum(1 + _parts(kind.field(at).type) for at in range(kind.num_fields))


def _storable(kind: "pa.DataType") -> "pa.DataType | None":
    """Return a type with text where nothing was seen; None where Parquet has no such type."""
    import pyarrow as pa  # noqa: PLC0415 - an extra

    if pa.types.is_null(kind):
        return pa.string()
    if pa.types.is_list(kind):
        item = _storable(kind.value_type)
        return pa.list_(item) if item else None
    if pa.types.is_struct(kind):
        parts = [(one.name, _storable(one.type)) for one in kind]
        # A structure without fields cannot be stored.
        return pa.struct(parts) if parts and all(part for _, part in parts) else None
    return kind


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else as_json(value)
