"""Prints: tables or JSON on standard output, notices on standard error."""

import os
import sys
from typing import Any

import orjson
from rich.console import Console

_WIDTH_OF_FILES = 160
"""Characters in a line where there is no terminal that says how many it has."""


def screen(*, stderr: bool = False) -> Console:
    """Return a console that prints foreign text as it is, without reading markup in it."""
    console = Console(stderr=stderr, markup=False, highlight=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDTH_OF_FILES
    return console


def print_json(data: Any) -> None:
    """Print data as JSON, indented for people."""
    text = orjson.dumps(data, default=str, option=orjson.OPT_INDENT_2)
    sys.stdout.write(text.decode() + "\n")
    sys.stdout.flush()


def print_json_line(data: Any) -> None:
    """Print data as one line of JSON, at once."""
    sys.stdout.write(orjson.dumps(data, default=str).decode() + "\n")
    sys.stdout.flush()


def notice(text: str) -> None:
    """Say something on standard error."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
