"""Tables to lines of JSON: the rows of CSV, TSV and Parquet files, the elements of a JSON array.

Reads in constant memory. A row that cannot be used becomes a line with its problem; a file whose
further rows cannot be trusted is refused as a whole. Numbers are those of the file.
"""

import codecs
import csv
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, BinaryIO

from stepfleet.orchestrator.batches.files.raw_lines import LINE_LIMIT, RawLine, lines_in, too_long
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records import exact_json

ROWS_AT_ONCE = 100
_CHUNK = 256 * 1024
_REFUSED = {
    b"\x1f\x8b": "is compressed with gzip; unpack it first",
    b"PK\x03\x04": "is a spreadsheet or a zip archive; save it as CSV or Parquet",
}
Reader = Callable[[BinaryIO], Iterator[RawLine]]


def check_kind(file: BinaryIO) -> None:
    """Raise `ConfigurationError` for a file that no reader can read, whatever its name."""
    start = file.read(4)
    file.seek(0)
    for magic, problem in _REFUSED.items():
        if start.startswith(magic):
            raise ConfigurationError(problem)


def csv_rows(file: BinaryIO, delimiter: str | None = None) -> Iterator[RawLine]:
    """Yield the rows below the header as JSON objects; the columns are text.

    Without a `delimiter` it is a comma, or a semicolon where the header has those alone.
    """
    csv.field_size_limit(max(csv.field_size_limit(), LINE_LIMIT))  # the whole process's: raised
    text = _Text(file)
    if delimiter is None:
        first = text.peeked()
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
                msg = f"line {number}: is no CSV ({error}); correct it, as a quote without its end"
                raise ConfigurationError(msg) from None
            problem = f"is no row of CSV ({error}); double the quotes inside quotes"
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
        for batch in table.iter_batches(ROWS_AT_ONCE, use_threads=False):
            for values in batch.to_pylist():
                yield _as_line(row, row + 1, values, "row")
                row += 1
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        why = str(error).partition("\n")[0]
        raise ConfigurationError(f"row {row + 1}: is not readable as Parquet: {why}") from None


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
        return _decoded(first, 1)


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
        msg = f"column {twice[:60]!r} is there twice; give each its own name"
        raise ConfigurationError(msg)


def _csv_line(
    row: int, number: int, header: list[str], cells: list[str] | None, problem: str
) -> RawLine:
    if cells is not None and len(cells) != len(header):
        problem = f"has {len(cells)} fields, and the header {len(header)}; quote commas in texts"
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
        raise ConfigurationError(f"line {text.line}: there is more behind the array; remove it")


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
        """Go behind the next character, which must be `wanted`."""
        found = self.next()
        if found != wanted:
            there = repr(found) if found else "the end of the file"
            msg = f"line {self.line}: is not valid JSON ({there}, expected {wanted!r})"
            raise ConfigurationError(msg)
        self._place += 1

    def element(self) -> str:
        """Return the text of the value that begins here and go behind it."""
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
            # A number may go on behind what was read.
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
