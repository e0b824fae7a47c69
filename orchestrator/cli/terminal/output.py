"""Prints: tables or JSON on standard output, notices on standard error."""

import codecs
import contextlib
import io
import os
import re
import sys
import time
from collections.abc import Callable
from operator import methodcaller
from typing import IO, Any, TextIO, TypeVar, cast

import orjson
from rich.console import Console, RenderableType

from stepfleet.orchestrator.records import exact_json

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
    """Return a callback that prints a notice about so many rows, at most once a second."""
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
