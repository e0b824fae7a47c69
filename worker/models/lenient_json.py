"""Reads JSON of services, some of which leave control characters in their texts unescaped. Pure.

Everything else that is no JSON stays refused.
"""

import re
from typing import Any

import orjson

MENDED_BYTES = 2 * 1024 * 1024
"""Bytes of the longest text that is mended: the search for its strings holds up the others."""

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_CONTROL = re.compile(rb"[\x00-\x1f]")
_CODES = frozenset(range(0x20))


def read_json(data: bytes) -> Any:
    """Return the value of `data`. Raises `orjson.JSONDecodeError` where it is none."""
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
