"""A table of results: rows on disk, until all their columns are known, then written as a whole."""

import csv
import io
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, Self

from stepfleet.orchestrator.batches.files.tables.arrow import (
    arrow_types,
    record_batch,
    require_arrow,
)
from stepfleet.orchestrator.batches.files.tables.fields import Field, as_json, cells, columns
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.run.results import AgentRunResult

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
        """Return the table, in memory; integers and booleans keep their type beside nulls.

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
