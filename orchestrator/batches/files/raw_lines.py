"""The lines of a file as bytes of JSON. Knows neither fields nor where the file comes from."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

LINE_LIMIT = 4 * 1024 * 1024
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class RawLine:
    """One line that is not blank. `row` counts such lines from 0, `number` all lines from 1.

    `data` is None for a line that cannot be used, with the `problem`. `unit` is what `number`
    counts.
    """

    row: int
    number: int
    data: bytes | None
    problem: str = ""
    unit: str = "line"


def too_long(row: int, number: int, unit: str = "line") -> RawLine:
    """Return a line that is left out for its size."""
    return RawLine(row, number, None, "is longer than 4 MiB; shorten it", unit)


def lines_in(file: BinaryIO) -> Iterator[RawLine]:
    """Yield the lines of a JSONL file from its place on; of those above 4 MiB nothing is kept."""
    row = number = 0
    while (line := file.readline(LINE_LIMIT)) != b"":
        number += 1
        whole = line.endswith(b"\n") or len(line) < LINE_LIMIT or _skip_rest(file) == 0
        data = line.removeprefix(_BOM) if number == 1 else line
        data = data.strip()
        if data or not whole:
            yield RawLine(row, number, data) if whole else too_long(row, number)
            row += 1


def _skip_rest(file: BinaryIO) -> int:
    """Read to the end of an overlong line without keeping it; return its further bytes."""
    skipped = 0
    while (part := file.readline(LINE_LIMIT)) != b"":
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped
