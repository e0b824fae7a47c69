"""What commands print: numbers, times and foreign text, rows of any width, JSON, notices."""

import codecs
import contextlib
import io
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from operator import methodcaller
from typing import IO, Any, TextIO, TypeVar, cast

import orjson
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stepfleet.orchestrator.records import exact_json

_SMALLEST = 9
"""Digits of a billionth of a dollar, the unit in which the ledger counts."""
WIDE = 100
"""Columns of a terminal from which on a table has all its columns side by side."""
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400


def seconds(value: float | None) -> str:
    """Return a duration: `0.4 s`, `12 s`, `3 min 05 s`, `2 h 10 min`; `-` if unknown."""
    if value is None:
        return "-"
    if value < 10:  # noqa: PLR2004 - below this, tenths tell something
        return f"{value:.1f} s"
    whole = round(value)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE:02d} s"
    if whole < _DAY:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE:02d} min"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR} h"


def usd(value: float | Decimal, *, guessed: bool = False) -> str:
    """Return an amount: cents for large ones, more digits for small ones.

    `guessed` marks an estimate: by a default price, or of tokens that were counted here.
    """
    if guessed:
        return f"~{usd(value)}"
    if value < 0:
        return f"-{usd(-value)}"
    if not value or value >= 1:
        return f"${value:,.2f}"
    digits = max(4, 1 - math.floor(math.log10(value)))  # two that are no zeros
    return f"${value:.{min(digits, _SMALLEST)}f}"


def count(value: int, *, guessed: bool = False) -> str:
    """Return a whole number with thousands separated; `guessed` marks an estimate."""
    return f"~{value:,}" if guessed else f"{value:,}"


def moment(value: datetime | None) -> str:
    """Return a time in UTC to the second, or `-`."""
    return value.strftime("%Y-%m-%d %H:%M:%S") + " UTC" if value else "-"


def shown(value: Any, limit: int = 0) -> str:
    """Return foreign data as text that cannot move the cursor or colour the terminal.

    Line breaks and tabs stay where there is no `limit`; with one, the text becomes a single
    line of at most that many characters.
    """
    text = value if isinstance(value, str) else exact_json.text(value, default=str)
    if limit:
        text = " ".join(text.split())
        text = text if len(text) <= limit else f"{text[: limit - 1]}…"
    return "".join(
        one if one.isprintable() or one in "\n\t" else "\N{REPLACEMENT CHARACTER}" for one in text
    )


def shown_error(text: str, limit: int = 0) -> str:
    """Return an error as `shown` does; a long one keeps both ends.

    The error of a run below others ends with its cause, after those that it went through.
    """
    line = " ".join(text.split())
    if not limit or len(line) <= limit:
        return shown(text, limit)
    half = (limit - 3) // 2
    return shown(f"{line[:half].rstrip()} … {line[-half:].lstrip()}", limit)


_FILE_WIDTH = 160
"""Characters in a line where there is no terminal that tells its width."""

NOTICE_SECONDS = 1.0
_CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]"
)
"""C0 without line breaks and tabs, DEL, C1, and the characters that direct bidirectional text."""
T = TypeVar("T")


def screen(*, stderr: bool = False) -> Console:
    """Return a console that prints foreign text as it is, without reading markup in it."""
    console = Console(stderr=stderr, markup=False, highlight=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _FILE_WIDTH
    return console


def print_json(data: Any) -> None:
    """Print data as JSON, indented for people."""
    _write(exact_json.dumps(data, default=str, option=orjson.OPT_INDENT_2))


def print_json_line(data: Any) -> None:
    """Print data as one line of JSON, at once."""
    _write(exact_json.dumps(data, default=str))


def print_either(
    found: T,
    picture: Callable[[T], RenderableType],
    *,
    json: bool,
    as_data: Callable[[T], Any] = methodcaller("to_dict"),
) -> None:
    """Print a record as JSON, or as its `picture` for people."""
    if json:
        print_json(as_data(found))
    else:
        screen().print(picture(found))


def print_outcome(data: dict[str, Any], text: str, *, json: bool) -> None:
    """Print the outcome of a command: its data as JSON, or a text, whose lines are not broken."""
    if json:
        print_json(data)
    else:
        print_text(text)


def print_text(text: str) -> None:
    """Print a text at once, without breaking its lines."""
    _write(text.encode(errors="replace"))


def bytes_out() -> IO[bytes]:
    """Return standard output for bytes of text: a terminal gets it as `print_text` prints it."""
    if sys.stdout.isatty():
        return cast("IO[bytes]", _Shown(sys.stdout))
    return sys.stdout.buffer


def text_out() -> codecs.StreamWriter:
    """Return standard output for text: a terminal gets it as `print_text` prints it."""
    return codecs.getwriter("utf-8")(bytes_out(), "replace")


class _Shown(io.RawIOBase):
    """Takes UTF-8, also in parts of characters, and writes what a terminal may get."""

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        given = bytes(data)
        self._terminal.write(_for(self._terminal, self._decoder.decode(given)))
        return len(given)

    def flush(self) -> None:
        self._terminal.flush()


def notice(text: str) -> None:
    """Print a notice on standard error, unless its terminal is closed."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{_for(sys.stderr, text)}\n")
        sys.stderr.flush()


def every_second(text: Callable[[int], str]) -> Callable[[int], None]:
    """Return a callback that prints a notice about the number of rows, at most once a second."""
    last = time.monotonic()

    def report(rows: int) -> None:
        nonlocal last
        if time.monotonic() - last > NOTICE_SECONDS:
            last = time.monotonic()
            notice(text(rows))

    return report


def _write(line: bytes) -> None:
    sys.stdout.write(_for(sys.stdout, line.decode()) + "\n")
    sys.stdout.flush()


def _for(stream: TextIO, text: str) -> str:
    """Return a text as a terminal gets it: what would move its cursor or turn text around escaped.

    JSON stays the same data. Files and pipes get the characters themselves.
    """
    if not stream.isatty():
        return text
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


_GAP = 2


@dataclass(frozen=True, slots=True)
class Column:
    """A column. `key` columns name the row, `long` ones go beneath it first; numbers are right."""

    name: str
    key: bool = False
    number: bool = False
    long: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows side by side; where they do not fit, long cells beneath, then all but the keys.

    A column without any text is left out. `total`: the last row is the sum of those before.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[str | Text]]
    total: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        texts = [[_text(cell) for cell in row] for row in self.rows]
        shown = [at for at, _ in enumerate(self.columns) if any(row[at].plain for row in texts)]
        short = [at for at in shown if not self.columns[at].long]
        width = options.max_width
        for beside in (shown, short):
            if _width(self.columns, texts, beside) <= width:
                yield from self._beside(texts, beside, [at for at in shown if at not in beside])
                return
        yield from self._stacked(texts, shown)

    def _beside(
        self, texts: list[list[Text]], beside: list[int], beneath: list[int]
    ) -> Iterator[Table | Padding]:
        widths = [_widest(self.columns[at].name, (row[at] for row in texts)) for at in beside]
        groups = [[row] for row in texts] if beneath else [texts]
        for number, group in enumerate(groups):
            table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, show_header=not number)
            for at, wide in zip(beside, widths, strict=True):
                column = self.columns[at]
                table.add_column(
                    column.name,
                    justify="right" if column.number else "left",
                    no_wrap=True,
                    min_width=wide,
                )
            for row in group:
                is_total = self.total and row is texts[-1]
                table.add_row(*(row[at] for at in beside), style="bold" if is_total else None)
            yield table
            for at in beneath:
                if group[0][at].plain:
                    yield _indented(_labelled(self.columns[at].name, group[0][at]))

    def _stacked(self, texts: list[list[Text]], shown: list[int]) -> Iterator[Text | Padding]:
        keys = [at for at in shown if self.columns[at].key]
        others = [at for at in shown if not self.columns[at].key]
        for row in texts:
            if keys:
                yield Text(", ").join(row[at] for at in keys if row[at].plain)
            filled = [at for at in others if row[at].plain]
            facts = [at for at in filled if not self.columns[at].long]
            pairs = (_labelled(self.columns[at].name, row[at]) for at in facts)
            yield _indented(Text(", ").join(pairs))
            for at in filled:
                if self.columns[at].long:
                    yield _indented(_labelled(self.columns[at].name, row[at]))


def _text(cell: str | Text) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)


def _widest(name: str, cells: Iterable[Text]) -> int:
    return max((Text(name).cell_len, *(cell.cell_len for cell in cells)))


def _width(columns: Sequence[Column], texts: list[list[Text]], beside: list[int]) -> int:
    return sum(_widest(columns[at].name, (row[at] for row in texts)) + _GAP for at in beside) - _GAP


def _labelled(name: str, cell: Text) -> Text:
    return Text.assemble((f"{name} ", "dim"), cell)


def _indented(text: Text) -> Padding:
    return Padding(text, (0, 0, 0, _GAP))
