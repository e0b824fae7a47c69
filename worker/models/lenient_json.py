"""Reads JSON of services, some of which leave control characters in their texts unescaped. Pure.

Everything else that is no JSON stays refused.
"""

import re
from typing import Any

import orjson

MENDED_BYTES = 2 * 1024 * 1024
"""Bytes of the longest text that is mended: the search for its strings holds up the others."""

MOST_SIGNS = 2_000_000
"""Brackets, commas and colons that a text may have. While the parser makes values of them no thread
of the process runs, and in an answer of 16 MiB that can be many seconds."""

# A string without an end reaches to the end of the text, and nothing is tried twice: a search that
# began anew at each of its escaped quotes would take hours for what MENDED_BYTES can hold.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_CONTROL = re.compile(rb"[\x00-\x1f]")
_SIGNS = (b",", b":", b"[", b"{")
_CODES = frozenset(range(0x20))


def read_json(data: bytes) -> Any:
    """Return the value of `data`.

    Raises `orjson.JSONDecodeError` where it is none, and where it may have far more values than an
    answer has.
    """
    if len(data) > MOST_SIGNS and sum(map(data.count, _SIGNS)) > MOST_SIGNS:
        raise orjson.JSONDecodeError(f"more than {MOST_SIGNS} brackets, commas and colons", "", 0)
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        if len(data) > MENDED_BYTES or not _CONTROL.search(data):
            raise
        return orjson.loads(_STRING.sub(_escaped, data))


def _escaped(string: re.Match[bytes]) -> bytes:
    text = string[0]
    for code in _CODES.intersection(text):  # a text of control characters alone is one pass each
        text = text.replace(bytes((code,)), b"\\u%04x" % code)
    return text
