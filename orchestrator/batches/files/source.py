"""Where a batch's lines come from: a file, standard input or objects; readable twice, line by line.

Knows bytes and line numbers only. What cannot be rewound is copied to a temporary file first.
"""

import codecs
import csv
import itertools
import json
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

from stepfleet.orchestrator.batches.files.openai_format import (
    LINE_LIMIT,
    RawLine,
    lines_in,
    too_long,
)
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records import exact_json

ROWS_AT_ONCE = 100
_SEPARATOR = re.compile(r"sep=([^\w\s\"]|\t)\r?\n")
_CHUNK = 256 * 1024
_START = 4096
_REFUSED = {
    b"\x1f\x8b": "is compressed with gzip; unpack it first: gunzip FILE",
    b"\x28\xb5\x2f\xfd": "is compressed with Zstandard; unpack it first: unzstd FILE",
    b"BZh91AY": "is compressed with bzip2; unpack it first: bunzip2 FILE",
    b"\xfd7zXZ\0": "is compressed with xz; unpack it first: unxz FILE",
    b"PK\x03\x04": "is a spreadsheet or a zip archive; save it as CSV or Parquet",
    b"\xd0\xcf\x11\xe0": "is an Excel file of the old form (.xls); save it as CSV",
    b"ARROW1\0\0": "is an Arrow or Feather file; write it as Parquet: pyarrow.parquet.write_table",
    b"\xff\xff\xff\xff": "is an Arrow stream; write it as Parquet: pyarrow.parquet.write_table",
    b"SQLite format 3\0": "is a database of SQLite; export the table as CSV",
    b"\xff\xfe": "is in UTF-16; save it as UTF-8: iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "is in UTF-16; save it as UTF-8: iconv -f UTF-16 -t UTF-8",
}
_ARRAY = "is a JSON array; name it .json, or say --input-format json"
_PARQUET = b"PAR1\x15"
_OPEN = (b"{", b"[", b",")
"""How the first line ends of JSON that is spread over several lines."""
Reader = Callable[[BinaryIO], Iterator[RawLine]]


def check_kind(file: BinaryIO, kind: str) -> None:
    """Raise `ConfigurationError` for a file that the reader of `kind` cannot read.

    It says what the file is, and how to make one of it that can be read.
    """
    start = file.read(_START)
    file.seek(0)
    for magic, problem in _REFUSED.items():
        if start.startswith(magic):
            raise ConfigurationError(problem)
    if kind == "parquet":
        return
    if start.startswith(_PARQUET):
        raise ConfigurationError(
            "is a Parquet file; name it .parquet, or say --input-format parquet"
        )
    if b"\0" in start:
        msg = "has zero bytes, so it is not text in UTF-8; save it as UTF-8 (it may be UTF-16)"
        raise ConfigurationError(msg)
    if b"\n" not in start and b"\r" in start.rstrip():
        msg = "ends its lines with CR alone; save it with LF or CRLF: tr '\\r' '\\n' < FILE"
        raise ConfigurationError(msg)
    lines = start.removeprefix(codecs.BOM_UTF8).lstrip().splitlines()
    if kind == "jsonl" and len(lines) == 1 and lines[0].startswith(b"["):
        raise ConfigurationError(_ARRAY)
    if kind in ("jsonl", "json") and len(lines) > 1:
        _check_lines(lines[0].strip(), lines[1].lstrip(), kind)


def _check_lines(first: bytes, second: bytes, kind: str) -> None:
    """Raise `ConfigurationError` where lines are parts of one JSON value."""
    if first.startswith(b"["):
        if kind == "jsonl" and first.endswith(_OPEN):
            raise ConfigurationError(_ARRAY)
    elif first == b"{" or (first.endswith(_OPEN) and not second.startswith(b"{")):
        raise ConfigurationError(
            "spreads a JSON object over several lines; write each object on one line "
            "(jq -c . FILE), or all of them as an array in a .json file"
        )


def csv_rows(file: BinaryIO, delimiter: str | None = None) -> Iterator[RawLine]:
    """Yield the rows below the header as JSON objects; the columns are text.

    Without a `delimiter` it is a comma, or a semicolon where the header has those alone.
    """
    csv.field_size_limit(max(csv.field_size_limit(), LINE_LIMIT))  # the whole process's: raised
    text = _Text(file)
    first = text.peeked()
    if said := _SEPARATOR.fullmatch(first):  # Excel writes it above the header, and reads it
        delimiter = said.group(1)
        next(text)
    if delimiter is None:
        if "\t" in first and "," not in first and ";" not in first:
            msg = "has tabs in its header and no comma; name it .tsv, or say --input-format tsv"
            raise ConfigurationError(msg)
        delimiter = ";" if ";" in first and "," not in first else ","
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    header: list[str] | None = None
    row = 0
    while True:
        number = text.number + 1
        text.size = 0
        problem, cells = "", None
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if text.number != number or header is None:
                msg = f"line {number}: is not valid CSV ({error}); close its quotes"
                raise ConfigurationError(msg) from None
            problem = f"is not a row of CSV ({error}); double the quotes inside quotes"
        if cells == []:
            continue
        if header is None:
            header = _header(cells or [])
            continue
        yield _csv_line(row, number, header, cells, problem)
        row += 1


def json_elements(file: BinaryIO) -> Iterator[RawLine]:
    """Yield the elements of a JSON array; of a file that is none, its lines."""
    while (start := file.read(1)) in (b" ", b"\t", b"\r", b"\n", b"\xef", b"\xbb", b"\xbf"):
        pass
    file.seek(0)
    return _elements(file) if start == b"[" else lines_in(file)


def parquet_rows(file: BinaryIO) -> Iterator[RawLine]:
    """Yield a Parquet file's rows as JSON objects.

    Dates and times are ISO text, decimals text, durations seconds, bytes base64.
    """
    try:
        import pyarrow as pa  # noqa: PLC0415 - an extra, and slow to load
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError:
        msg = "Parquet files need pyarrow: pip install 'stepfleet[tables]'"
        raise ConfigurationError(msg) from None
    row = 0
    try:
        table = parquet.ParquetFile(file, buffer_size=_CHUNK, pre_buffer=False)
        _check_names(table.schema_arrow.names)
        exact = _exact(table.schema_arrow)
        for batch in table.iter_batches(ROWS_AT_ONCE, use_threads=False):
            for values in (batch.cast(exact) if exact else batch).to_pylist():
                yield _as_line(row, row + 1, values, "row")
                row += 1
    except LookupError as error:  # of the library of time zones, whichever is installed
        msg = f"row {row + 1}: has times in the time zone {error}, which is not known here; "
        raise ConfigurationError(f"{msg}store them in UTC, or as text") from None
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        why = str(error).partition("\n")[0]
        raise ConfigurationError(f"row {row + 1}: is not readable as Parquet: {why}") from None


def _exact(schema: Any) -> Any:
    """Return the schema with times of the day in nanoseconds as text: Python's have fewer digits.

    None where there is no such time.
    """
    import pyarrow as pa  # noqa: PLC0415 - as above

    def as_text(kind: Any) -> Any:
        if pa.types.is_time64(kind) and kind.unit == "ns":
            return pa.string()
        if pa.types.is_list(kind):
            return pa.list_(kind.value_field.with_type(as_text(kind.value_type)))
        if pa.types.is_large_list(kind):
            return pa.large_list(kind.value_field.with_type(as_text(kind.value_type)))
        if pa.types.is_struct(kind):
            return pa.struct([one.with_type(as_text(one.type)) for one in kind])
        return kind

    exact = pa.schema([one.with_type(as_text(one.type)) for one in schema])
    return None if exact.equals(schema) else exact


READERS: dict[str, Reader] = {
    "jsonl": lines_in,
    "json": json_elements,
    "csv": csv_rows,
    "tsv": partial(csv_rows, delimiter="\t"),
    "parquet": parquet_rows,
}
TABLES = ("csv", "tsv", "parquet")


class _Text:
    """A file's lines as text, counted; `size` is how much was read since it was set to 0."""

    def __init__(self, file: BinaryIO) -> None:
        self.number = self.size = 0
        self._file = file

    def __iter__(self) -> "_Text":
        return self

    def __next__(self) -> str:
        raw = self._file.readline(LINE_LIMIT)
        if not raw:
            raise StopIteration
        self.number += 1
        self.size += len(raw)
        if self.size >= LINE_LIMIT:
            msg = (
                f"line {self.number}: its row is longer than 4 MiB; shorten it, or end a quote that"
                " opens above"
            )
            raise ConfigurationError(msg)
        return _decoded(raw.removeprefix(codecs.BOM_UTF8) if self.number == 1 else raw, self.number)

    def peeked(self) -> str:
        """Return the first line without reading on."""
        first = self._file.readline(LINE_LIMIT)
        self._file.seek(0)
        return _decoded(first.removeprefix(codecs.BOM_UTF8), 1)


def _decoded(raw: bytes, number: int) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        msg = f"line {number}: is not UTF-8 (byte {error.start + 1}); save the file as UTF-8"
        raise ConfigurationError(msg) from None


def _header(cells: list[str]) -> list[str]:
    """Return the columns' names; those without one, as pandas writes its index, stay empty."""
    names = [cell.strip() for cell in cells]
    _check_names([name for name in names if name])
    return names


def _check_names(names: list[str]) -> None:
    if not names:
        raise ConfigurationError("the header names no column; write the columns' names")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        msg = f"column {twice[:60]!r} appears twice; give each its own name"
        raise ConfigurationError(msg)


def _csv_line(
    row: int, number: int, header: list[str], cells: list[str] | None, problem: str
) -> RawLine:
    if cells is not None and len(cells) != len(header):
        problem = f"has {len(cells)} fields, and the header {len(header)}; quote commas in texts"
    if cells is not None and not any(map(str.strip, cells)):
        problem = "has empty cells only; remove the row, or leave such rows out: --skip-invalid"
    if cells is None or problem:
        return RawLine(row, number, None, problem)
    pairs = zip(header, cells, strict=True)
    return _as_line(row, number, {name: cell for name, cell in pairs if name}, "line")


def _as_line(row: int, number: int, values: dict[str, Any], unit: str) -> RawLine:
    try:
        data = exact_json.dumps(values, default=exact_json.json_form)
    except TypeError as error:
        return RawLine(row, number, None, f"has a value without a JSON form ({error})", unit)
    return (
        too_long(row, number, unit)
        if len(data) > LINE_LIMIT
        else RawLine(row, number, data, unit=unit)
    )


def _elements(file: BinaryIO) -> Iterator[RawLine]:
    """Yield an array's elements, each as its own text: one rule for numbers in all formats."""
    text = _Characters(file)
    text.take("[")
    row = 0
    while text.next() != "]":
        if row:
            text.take(",")
            text.next()
        number = text.line
        yield RawLine(row, number, text.element().encode("utf-8", "surrogatepass"))
        row += 1
    text.take("]")
    if text.next():
        raise ConfigurationError(f"line {text.line}: there is more after the array; remove it")


class _Characters:
    """The text of a JSON file from a place on; holds little more than one element."""

    def __init__(self, file: BinaryIO) -> None:
        self.line = 1
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text = ""
        self._place = 0
        self._over = False

    def next(self) -> str:
        """Go to the next character that is not blank and return it; "" at the end."""
        while True:
            found = _BLANKS.match(self._text, self._place)
            self._go_to(found.end() if found else self._place)
            if self._place < len(self._text) or not self._more():
                return self._text[self._place : self._place + 1]

    def take(self, wanted: str) -> None:
        """Skip the next character, which must be `wanted`."""
        found = self.next()
        if found != wanted:
            there = repr(found) if found else "the end of the file"
            msg = f"line {self.line}: is not valid JSON ({there}, expected {wanted!r})"
            raise ConfigurationError(msg)
        self._place += 1

    def element(self) -> str:
        """Return the text of the value that begins here, and skip it."""
        while True:
            held = len(self._text) - self._place
            try:
                _, end = _DECODER.raw_decode(self._text, self._place)
            except (ValueError, RecursionError) as error:
                if held < LINE_LIMIT and self._more(held):
                    continue
                why = getattr(error, "msg", "nested too deep")
                self._go_to(getattr(error, "pos", self._place))
                msg = f"line {self.line}: is not valid JSON ({why}), or longer than 4 MiB"
                raise ConfigurationError(msg) from None
            # A number may go on after what was read.
            if end < len(self._text) or self._over:
                found = self._text[self._place : end]
                self._go_to(end)
                return found
            self._more()

    def _go_to(self, place: int) -> None:
        self.line += self._text.count("\n", self._place, place)
        self._place = place

    def _more(self, least: int = 0) -> bool:
        """Read on, at least as much as `least`, so that a long element is tried few times."""
        if self._over:
            return False
        raw = self._file.read(max(_CHUNK, least))
        self._over = not raw
        try:
            text = self._decoder.decode(raw, final=self._over)
        except UnicodeDecodeError as error:
            number = self.line + self._text.count("\n", self._place)
            number += raw[: error.start].count(b"\n")
            msg = f"line {number}: is not UTF-8; save the file as UTF-8"
            raise ConfigurationError(msg) from None
        self._text, self._place = self._text[self._place :] + text, 0
        return not self._over


_DECODER = json.JSONDecoder(parse_int=len, parse_float=len)
_BLANKS = re.compile(r"[ \t\r\n]*")


InputFormat = Literal["jsonl", "json", "csv", "tsv", "parquet"]
Given = str | Path | Iterable[Any]


class BatchInput:
    """The lines of a batch; `path` is that of a regular file. Close it after use.

    A file with more than `most` lines is refused where reading reaches them.
    """

    def __init__(
        self,
        file: BinaryIO,
        name: str,
        kind: InputFormat = "jsonl",
        path: str = "",
        *,
        most: int | None = None,
    ) -> None:
        self.name = name
        self.path = path
        self.is_table = kind in TABLES
        self.form = "row below the header" if self.is_table else "JSON object per line"
        self._file = file
        self._kind = kind
        self._most = most

    def __iter__(self) -> Iterator[RawLine]:
        """Yield the lines from the start, however far an earlier reading came.

        Raises `ConfigurationError` where the file does not have its format, or has too many.
        """
        self._file.seek(0)
        try:
            check_kind(self._file, self._kind)
            yield from _first(READERS[self._kind](self._file), self._most)
        except ConfigurationError as error:
            raise ConfigurationError(f"{self.name}: {error.message}") from None

    @property
    def version(self) -> tuple[int, int]:
        """Two numbers that change when somebody writes to the file."""
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns

    def close(self) -> None:
        """Close the file; a temporary copy is gone then."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_input(source: Given, kind: InputFormat | None = None) -> BatchInput:
    """Open a file by its path, standard input by `-`, or objects as lines.

    Without a `kind` a file's ending names its format, and JSONL is every other's. Raises
    `ConfigurationError` when there is no such file, or an object is not JSON data.
    """
    if isinstance(source, BatchInput):
        return source
    if isinstance(source, str | Path):
        return _open_path(str(source), kind or format_by_name(str(source)))
    if not hasattr(source, "__iter__") or hasattr(source, "columns"):
        kind_given = type(source).__name__
        msg = (
            f"field 'source' is {kind_given!r}; give a file's path, '-' or lines (of a DataFrame "
            "df.to_dict('records')), then the agent"
        )
        raise ConfigurationError(msg)
    return BatchInput(_spool_objects(source), "the objects given")


def format_by_name(path: str) -> InputFormat:
    """Return the format that a file's ending names. Pure."""
    suffix = Path(path).suffix.lower()[1:]
    return suffix if suffix in READERS else "jsonl"  # type: ignore[return-value]  # its keys


def _first(lines: Iterator[RawLine], most: int | None) -> Iterator[RawLine]:
    yield from itertools.islice(lines, most)
    if most is not None and next(lines, None) is not None:
        msg = f"has more than {most:,} lines; split it, or use stepfleet submit"
        raise ConfigurationError(msg)


def _open_path(path: str, kind: InputFormat) -> BatchInput:
    if path == "-":
        return BatchInput(_spool(sys.stdin.buffer), "standard input", kind)
    try:
        file = Path(path).expanduser().open("rb")
    except OSError as error:
        why = error.strerror or error
        msg = f"batch file {path}: {why}; name a file with one JSON object per line, or a table"
        raise ConfigurationError(msg) from None
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return BatchInput(file, path, kind, str(Path(path).expanduser().resolve()))
    with file:
        return BatchInput(_spool(file), path, kind)


def _spool(source: BinaryIO) -> BinaryIO:
    copy = tempfile.TemporaryFile()  # noqa: SIM115 - the input closes it
    shutil.copyfileobj(source, copy, 1024 * 1024)
    copy.flush()
    return copy


def _spool_objects(objects: Iterable[Any]) -> BinaryIO:
    copy = tempfile.TemporaryFile()  # noqa: SIM115 - the input closes it
    try:
        for number, one in enumerate(objects, 1):
            copy.write(_line_of(one, number))
    except BaseException:
        copy.close()
        raise
    copy.flush()
    return copy


def _line_of(one: Any, number: int) -> bytes:
    data = {"input": one} if isinstance(one, str) else one
    try:
        return exact_json.dumps(data, default=exact_json.json_form) + b"\n"
    except TypeError as error:
        msg = f"line {number}: is not valid JSON data ({error}); give text, numbers, lists, dicts"
        raise ConfigurationError(msg) from None
