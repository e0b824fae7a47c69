"""Results as rows: the fields of a row, rows on disk, and their way to CSV, Parquet and Arrow.

Rows stay on disk until all their columns are known, then the table is written as a whole.
"""

import csv
import io
import json
import re
import tempfile
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Any, Literal, Self

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.run.results import AgentRunResult

if TYPE_CHECKING:
    import pyarrow as pa

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
        raise ConfigurationError("fields: none is named; write some: id,structured.*,cost_usd")
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
        elif value is not None:  # data that is not an object: a list, a number
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
        msg = f"fields: a result has no field {text!r}; there are {', '.join(known)}"
        if root not in known and "*" not in text:
            msg += f"; a part of the answer's data is structured.{text}"
        raise ConfigurationError(msg)
    if (path or spread) and known[root] != "data":
        msg = f"fields: {text!r}: {root} is {known[root]} and has no sub-fields; write {root}"
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
    """Return the type that a property's JSON Schema names, null if it is not a plain one."""
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


if TYPE_CHECKING:
    from pandas import DataFrame
    from pyarrow import Table
else:  # extras, which nothing imports before it needs them
    DataFrame = Table = Any

IN_MEMORY = 8 << 20
ROWS_AT_ONCE = 10_000
BYTES_AT_ONCE = 16 << 20
MOST_COLUMNS = 1000
_FORMULA = re.compile(r"[=+\-@\t\r\n]")
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?")
Row = dict[str, Any]


class ResultTable:
    """The selected fields of results, a row each; rows beyond a few megabytes are on disk.

    Memory stays bounded for any number of rows, except in `to_arrow` and `to_pandas`, which return
    the whole table. Parquet, Arrow and pandas need the extra `tables`.
    """

    def __init__(self, fields: Sequence[Field]) -> None:
        self.count = 0
        """How many rows there are."""
        self._fields = tuple(fields)
        self._seen: dict[str, None] = {}
        self._declared: Mapping[str, Any] = {}
        self._file: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the rows."""
        self._file.close()

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return columns(self._fields, self._seen)

    def add(self, result: AgentRunResult, properties: Mapping[str, Any] | None = None) -> None:
        """Add a row; `properties` of its answer's JSON Schema are columns even if no row has them.

        Raises `ConfigurationError` where the answers have too many keys to be columns.
        """
        if properties is not None and properties is not self._declared:
            self._declared = properties
            if any(one.spread and one.name == "structured" for one in self._fields):
                for name in properties:
                    self._column(f"structured.{name}")
        row = cells(result, self._fields)
        for name in row:
            self._column(name)
        # Models may write lone surrogates, which no file of text can hold.
        self._file.write(as_json(row).encode("utf-8", "replace") + b"\n")
        self.count += 1

    def _column(self, name: str) -> None:
        if name in self._seen:
            return
        if len(self._seen) >= MOST_COLUMNS:
            msg = (
                f"fields: the answers have more than {MOST_COLUMNS:,} keys, too many columns; "
                "select 'structured' as one column, or some of its parts"
            )
            raise ConfigurationError(msg)
        self._seen[name] = None

    def rows(self) -> Iterator[list[Row]]:
        """Yield the rows in groups, bounded in number and size."""
        self._file.seek(0)
        group: list[Row] = []
        size = 0
        for line in self._file:
            group.append(json.loads(line))
            size += len(line)
            if len(group) >= ROWS_AT_ONCE or size >= BYTES_AT_ONCE:
                yield group
                group, size = [], 0
        if group:
            yield group
        self._file.seek(0, io.SEEK_END)

    def write_csv(self, file: IO[bytes]) -> None:
        """Write the table as CSV: UTF-8, a header, commas, line feeds; data as JSON, null as "".

        A text that a spreadsheet would run as a formula gets an apostrophe in front.
        """
        text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
        writer = csv.writer(text, lineterminator="\n")
        names = self.columns
        writer.writerow(_plain(name) for name in names)
        for group in self.rows():
            writer.writerows([_plain(row.get(name)) for name in names] for row in group)
        text.detach()

    def write_parquet(self, file: IO[bytes]) -> None:
        """Write the table as Parquet (zstd), a row group for up to 10,000 rows.

        Raises `ConfigurationError` without pyarrow.
        """
        require_arrow()
        import pyarrow.parquet as pq  # noqa: PLC0415 - an extra

        schema = arrow_types(self.columns, self._declared, self.rows)
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for group in self.rows():
                writer.write_batch(record_batch(schema, group))

    def to_arrow(self) -> Table:
        """Return the table, in memory. Raises `ConfigurationError` without pyarrow."""
        require_arrow()
        import pyarrow as pa  # noqa: PLC0415 - an extra

        schema = arrow_types(self.columns, self._declared, self.rows)
        groups = [record_batch(schema, group) for group in self.rows()]
        return pa.Table.from_batches(groups, schema)

    def to_pandas(self) -> DataFrame:
        """Return the table, in memory; integers and booleans keep their type among nulls.

        Raises `ConfigurationError` without pandas and pyarrow.
        """
        require_arrow("pandas")
        import pandas as pd  # noqa: PLC0415 - an extra
        import pyarrow as pa  # noqa: PLC0415 - an extra

        kept = {pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype()}
        return self.to_arrow().to_pandas(types_mapper=kept.get)


def _plain(value: Any) -> str:
    """Return the text of a CSV cell."""
    if value is None:
        return ""
    if not isinstance(value, str):
        return as_json(value)
    if _FORMULA.match(value) and not _NUMBER.fullmatch(value):
        return f"'{value}"
    return value
