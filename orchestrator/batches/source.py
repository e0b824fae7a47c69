"""Where a batch's lines come from: a file, standard input or objects; readable twice, line by line.

Knows bytes and line numbers only. What cannot be rewound is copied to a temporary file first.
"""

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import orjson
from pydantic import BaseModel

from stepfleet.orchestrator.errors import ConfigurationError

LINE_LIMIT = 4 * 1024 * 1024
_BOM = b"\xef\xbb\xbf"
Given = str | Path | Iterable[Any]


@dataclass(frozen=True, slots=True)
class RawLine:
    """One line that is not blank. `row` counts such lines from 0, `number` all lines from 1.

    `data` is None for a line above 4 MiB.
    """

    row: int
    number: int
    data: bytes | None


class BatchInput:
    """The lines of a batch. Close it after use."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.name = name
        self._file = file

    def __iter__(self) -> Iterator[RawLine]:
        """Yield the lines from the start, however far an earlier reading came."""
        self._file.seek(0)
        row = number = 0
        while (line := self._file.readline(LINE_LIMIT)) != b"":
            number += 1
            whole = line.endswith(b"\n") or len(line) < LINE_LIMIT or self._skip_rest() == 0
            data = line.removeprefix(_BOM) if number == 1 else line
            data = data.strip()
            if data or not whole:
                yield RawLine(row, number, data if whole else None)
                row += 1

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

    def _skip_rest(self) -> int:
        """Read to the end of an overlong line without keeping it; return its further bytes."""
        skipped = 0
        while (part := self._file.readline(LINE_LIMIT)) != b"":
            skipped += len(part)
            if part.endswith(b"\n"):
                break
        return skipped


def open_input(source: Given) -> BatchInput:
    """Open a file by its path, standard input by `-`, or objects as lines.

    Raises `ConfigurationError` when there is no such file, or an object is no JSON data.
    """
    if isinstance(source, str | Path):
        return _open_path(str(source))
    if not hasattr(source, "__iter__"):
        kind = type(source).__name__
        msg = f"field 'source' is {kind!r}; give a file's path, '-' or lines, then the agent"
        raise ConfigurationError(msg)
    return BatchInput(_spool_objects(source), "the objects given")


def _open_path(path: str) -> BatchInput:
    if path == "-":
        return BatchInput(_spool(sys.stdin.buffer), "standard input")
    try:
        file = Path(path).expanduser().open("rb")
    except OSError as error:
        why = error.strerror or error
        msg = f"batch file {path}: {why}; name a file with one JSON object per line"
        raise ConfigurationError(msg) from None
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return BatchInput(file, path)
    with file:
        return BatchInput(_spool(file), path)


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
        return orjson.dumps(data, default=_plain) + b"\n"
    except TypeError as error:
        msg = f"line {number}: is no JSON data ({error}); give dicts of text, numbers and lists"
        raise ConfigurationError(msg) from None


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_defaults=True)
    raise TypeError(f"{type(value).__name__} has no JSON form")
