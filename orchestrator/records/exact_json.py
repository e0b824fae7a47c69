"""JSON of foreign data, read and written so that whole numbers of any size stay as they are. Pure.

orjson makes floats of numbers beyond 64 bits and refuses to write them. What users, models and
tools give goes through here, wherever it is stored or shown.
"""

import base64
import json
import math
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, NoReturn, Self

import orjson
from pydantic import BaseModel
from pydantic_core import from_json

MOST_LEVELS = 254
"""Levels of nesting that are written; orjson has no more."""

MAX_DIGITS = 4300
"""Decimal digits of a whole number; the limit of Python's own conversion of text."""
_TOO_LONG = 10**MAX_DIGITS
_LEAST, _MOST = -(2**63), 2**64 - 1
_INEXACT = re.compile(rb"[0-9](?:[.eE]|[0-9]{15})")
"""What a text has in which a number may be written in another way than Python writes it."""


def dumps(
    value: Any, *, default: Callable[[Any], Any] | None = None, option: int | None = None
) -> bytes:
    """Return `value` as JSON in orjson's form; `default` and `option` are those of `orjson.dumps`.

    Whole numbers of any size are written in full, NaN and infinities as null. Raises `TypeError`
    for other types, text that is not valid Unicode, and more than 254 levels.
    """
    try:
        return orjson.dumps(value, default=default, option=option)
    except TypeError:
        exact = _Exact(default)
        whole = (option or 0) | orjson.OPT_PASSTHROUGH_DATACLASS
        return orjson.dumps(exact.of(value, 0), default=exact.other, option=whole)


def text(
    value: Any, *, default: Callable[[Any], Any] | None = None, option: int | None = None
) -> str:
    """Return what `dumps` does, as text."""
    return dumps(value, default=default, option=option).decode()


def loads(data: bytes | str, *, constants: bool = False) -> Any:
    """Return the value of JSON; with `constants`, which records may have, also NaN and infinities.

    Raises `orjson.JSONDecodeError`, a `ValueError`, on anything else, and for whole numbers of more
    than 4,300 digits.
    """
    try:
        return from_json(data, allow_inf_nan=constants)
    except ValueError:  # or nested deeper than that parser reads
        return orjson.loads(data)


def loads_as_written(data: bytes) -> Any:
    """Return the value of standard JSON whose fractions keep the form in which they are written.

    They are `Written` where `dumps` is to give `1.10` or `1e5` back as it was. Raises
    `json.JSONDecodeError`.
    """
    inexact = _INEXACT.search(data)
    try:
        plain = orjson.loads(data)
    except orjson.JSONDecodeError:
        if inexact is None:
            raise
        plain = None
    if inexact is None:
        return plain
    try:
        value = _AS_WRITTEN.decode(data.decode("utf-8", "surrogateescape"))
    except RecursionError:
        if plain is None:
            raise json.JSONDecodeError("nested too deep", "", 0) from None
        return plain
    if plain is None:
        _check_unicode(value)
    return value


def json_form(value: Any) -> Any:
    """Return the JSON form of a value that orjson has none for. Raises `TypeError`."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, date | time):  # subclasses, as those of pandas
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} has no JSON form")


class Written(float):
    """A fraction of a JSON text that remembers how it was written there."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> Self:
        """Return the number of a JSON text. Raises `json.JSONDecodeError` where it is too large."""
        made = super().__new__(cls, text)
        if math.isinf(made):
            raise json.JSONDecodeError(f"the number {text[:40]} is too large", text, 0)
        made.text = text
        return made


class _Exact:
    """A value in the making in which orjson writes what it refuses by itself."""

    def __init__(self, default: Callable[[Any], Any] | None) -> None:
        self._default = default

    def of(self, value: Any, level: int) -> Any:
        if isinstance(value, dict):
            return {key: self.of(one, self._deeper(level)) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.of(one, self._deeper(level)) for one in value]
        if isinstance(value, int):
            return value if _LEAST <= value <= _MOST else orjson.Fragment(_digits(value))
        if isinstance(value, Written):
            return orjson.Fragment(value.text)
        if isinstance(value, float):
            return float(value)
        return self.of(value.value, level) if isinstance(value, Enum) else value

    def other(self, value: Any) -> Any:
        """Return what stands for a value of another type."""
        if is_dataclass(value) and not isinstance(value, type):
            return self.of({one.name: getattr(value, one.name) for one in fields(value)}, 0)
        if self._default is None:
            raise TypeError(f"type {type(value).__name__} has no JSON form")
        return self.of(self._default(value), 0)

    @staticmethod
    def _deeper(level: int) -> int:
        if level >= MOST_LEVELS:
            raise TypeError(f"nested deeper than {MOST_LEVELS} levels")
        return level + 1


def _digits(value: int) -> str:
    if abs(value) >= _TOO_LONG:
        raise TypeError(f"a whole number has more than {MAX_DIGITS:,} digits; write it as text")
    return int.__repr__(value)


def _check_unicode(value: Any) -> None:
    try:
        dumps(value)
    except TypeError as error:
        raise json.JSONDecodeError(str(error), "", 0) from None


def _constant(word: str) -> NoReturn:
    raise json.JSONDecodeError(f"{word} is not a JSON number", word, 0)


def _whole(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:
        msg = f"a whole number has {len(digits):,} digits, more than {MAX_DIGITS:,}"
        raise json.JSONDecodeError(msg, digits, 0) from None


_AS_WRITTEN = json.JSONDecoder(parse_float=Written, parse_int=_whole, parse_constant=_constant)
