"""Where a batch's lines come from: a file, standard input or objects; readable twice, line by line.

Knows bytes and line numbers only. What cannot be rewound is copied to a temporary file first.
"""

import itertools
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

from stepfleet.orchestrator.batches.files.raw_lines import RawLine
from stepfleet.orchestrator.batches.files.readers import READERS, TABLES, check_kind
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records import exact_json

InputFormat = Literal["jsonl", "json", "csv", "tsv", "parquet"]
Given = str | Path | Iterable[Any]


class BatchInput:
    """The lines of a batch; `path` is that of a regular file. Close it after use.

    A file with more than `most` lines is refused where reading comes to them.
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

        Raises `ConfigurationError` where the file is no file of its format, or has too many.
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
    `ConfigurationError` when there is no such file, or an object is no JSON data.
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
        msg = f"line {number}: is no JSON data ({error}); give dicts of text, numbers and lists"
        raise ConfigurationError(msg) from None
