"""Reads JSON that a stranger wrote, within bounds; knows nothing of tools or models.

Text and ready-made values end as the same plain data. A value out of bounds is a `BoundsError`
that names the bound; nothing here recurses without a limit. Readers and writers of records give
up at 200 levels and more, with errors of their own, so deeper data is refused by its field before.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.exact_json import MAX_DIGITS

MAX_DEPTH = 100
"""Levels of nesting."""
READABLE_LEVELS = 200
"""Stored data of earlier versions is read up to the depth at which it can be written again."""
MAX_VALUES = 30_000
"""Values in all: making and checking one costs much more than its bytes."""
MAX_SIZE = 1024 * 1024
"""Default limit of a text, in bytes of UTF-8."""

_INT_BOUND = 10**MAX_DIGITS


class BoundsError(ValueError):
    """The text is not JSON, or the value is out of bounds or not JSON data."""


def load_bounded(text: str, *, limit: int = MAX_SIZE) -> Any:
    """Return the value of JSON `text` of at most `limit` bytes.

    Its strings may hold unescaped control characters. Raises `BoundsError` on anything else
    that is not standard JSON or is out of bounds.
    """
    if len(text) > limit or len(text.encode("utf-8", "surrogatepass")) > limit:
        raise BoundsError(f"the text is longer than the limit of {limit} bytes")
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise BoundsError(f"not valid JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise BoundsError(f"nested deeper than {MAX_DEPTH} levels") from None
    return plain_json(value, limit=limit)


def read_data(text: str, *, limit: int = MAX_SIZE) -> Any:
    """Return the data of a text that is JSON, also in a code fence. Raises `BoundsError`."""
    stripped = text.strip()
    if stripped.startswith("```") and stripped.endswith("```") and "\n" in stripped:
        stripped = stripped.partition("\n")[2].removesuffix("```")
    return load_bounded(stripped, limit=limit)


def plain_json(value: Any, *, limit: int = MAX_SIZE) -> Any:
    """Return `value` as plain JSON data of about at most `limit` bytes, copied.

    Mappings become dicts, lists and tuples lists. Raises `BoundsError` on other types, on text
    that is not valid Unicode or holds NUL, and on numbers that JSON does not have.
    """
    return _Copy(limit).of(value, 0)


def canonical_json(value: Any) -> str:
    """Return plain JSON data as the one text that equal data share: sorted, compact, ASCII."""
    return _CANONICAL.encode(value)


class _Copy:
    """One copy in the making; `left` bytes may still be used, which also ends endless values."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.left = limit
        self.values = 0

    def of(self, value: Any, depth: int) -> Any:
        self._spend(1)
        self.values += 1
        if self.values > MAX_VALUES:
            raise BoundsError(f"there are more than {MAX_VALUES} values; give less data")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, int):
            return _checked_int(value)
        if isinstance(value, float):
            return _checked_float(value)
        if depth >= MAX_DEPTH:
            raise BoundsError(f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, Mapping):
            return {self._key(key): self.of(one, depth + 1) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.of(one, depth + 1) for one in value]
        raise BoundsError(f"a value of type {type(value).__name__} is not JSON data")

    def _key(self, key: Any) -> str:
        if not isinstance(key, str):
            raise BoundsError(f"a key of type {type(key).__name__} is not text")
        return self._text(key)

    def _text(self, text: str) -> str:
        text = str.__str__(text)
        self._spend(len(text))
        if "\x00" in text:
            raise BoundsError("a text holds a NUL character; leave it out")
        if not text.isascii() and not is_unicode(text):
            raise BoundsError("a text holds a lone surrogate, which is not valid Unicode")
        return text

    def _spend(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise BoundsError(f"the value is larger than the limit of {self.limit} bytes")


def is_unicode(text: str) -> bool:
    """Return whether `text` can be written as UTF-8 (holds no lone surrogate)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_nesting(value: Any, field: str) -> None:
    """Raise `ConfigurationError` that names the field where it has more than 100 levels."""
    if is_too_deep(value):
        msg = f"field {field!r} is nested deeper than {MAX_DEPTH} levels; flatten it"
        raise ConfigurationError(msg)


def is_too_deep(value: Any, levels: int = MAX_DEPTH) -> bool:
    """Return whether a value has more levels; a value that holds itself has."""
    level = [value]
    for _ in range(levels):
        # By identity: a value in many places is visited once per level.
        level = list({id(child): child for one in level for child in _children(one)}.values())
        if not level:
            return False
    return any(isinstance(one, Mapping | list | tuple) for one in level)


def _children(value: Any) -> Any:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > MAX_DIGITS:
        raise BoundsError(f"an integer has more than {MAX_DIGITS} digits")
    return int(digits)


def _constant(word: str) -> NoReturn:
    raise BoundsError(f"not valid JSON: {word} is not a JSON number")


def _checked_int(value: int) -> int:
    if abs(value) >= _INT_BOUND:
        raise BoundsError(f"an integer has more than {MAX_DIGITS} digits")
    return int(value)


def _checked_float(value: float) -> float:
    if not math.isfinite(value):
        raise BoundsError("a number is infinite, out of range or NaN, which JSON does not have")
    return float(value)


# Models and servers leave line breaks and tabs in texts unescaped: their meaning is clear.
_DECODER = json.JSONDecoder(parse_int=_integer, parse_constant=_constant, strict=False)
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)
