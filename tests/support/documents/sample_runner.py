"""Runs a page's samples in one namespace: a JSON list of [source, line] comes in on standard input.

Puts out a JSON list of what each printed. A program of its own, so that samples run as users run
them: from a folder with their files, and nothing of a test around them.
"""

import contextlib
import io
import json
import sys
from typing import Any


def main() -> None:
    """Run them; an exception of a sample ends it with its traceback."""
    names: dict[str, Any] = {"__name__": "samples"}
    printed = []
    for source, line in json.load(sys.stdin):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            # Blank lines in front, so that a traceback names the line of the page.
            exec(compile("\n" * line + source, "page.md", "exec"), names)  # noqa: S102 - our own page
        printed.append(said.getvalue())
    json.dump(printed, sys.stdout)


if __name__ == "__main__":
    main()
