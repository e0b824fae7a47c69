"""Turns what a tool returned into JSON data, or says why it cannot.

Nothing is cut or replaced silently: what JSON does not have is an error that names the place
and the fix. Knows nothing of calls.
"""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import PurePath
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_jsonable_python

from stepfleet.orchestrator.errors import ToolExecutionError
from stepfleet.orchestrator.records.conversation.messages import value_text
from stepfleet.orchestrator.records.exact_json import MAX_DIGITS
from stepfleet.orchestrator.tools.schemas.bounded_json import MAX_DEPTH, is_unicode

RESULT_LIMIT = 256 * 1024
"""Bytes of UTF-8 that a result may have as text."""

_INT_BOUND = 10**MAX_DIGITS


def json_data(value: Any, *, limit: int = RESULT_LIMIT) -> Any:
    """Return `value` as JSON data whose text has at most `limit` bytes.

    Pydantic models, dataclasses, mappings, sequences, sets, iterators, enums, dates, UUIDs,
    decimals and paths are converted; of an iterator no more is taken than the limit has room
    for. Raises `ToolExecutionError` that names the place in the result for bytes, NaN, text that
    is not valid Unicode, nesting deeper than 100 levels, and other types; and one that names the
    limit.
    """
    data = _Conversion(limit).of(value, "result", 0)
    size = len(value_text(data).encode())
    if size > limit:
        raise _too_large(limit)
    return data


class _Conversion:
    """One conversion; it stops as soon as the result cannot be within the limit any more."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.left = limit

    def of(self, value: Any, place: str, depth: int) -> Any:
        self._spend(1)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            self._spend(len(value) - 1)
            return _text(str.__str__(value), place)
        if isinstance(value, int | float):
            return _number(value, place)
        if isinstance(value, bytes | bytearray | memoryview):
            raise _refused(place, "is bytes; return text, base64 for binary data")
        if depth >= MAX_DEPTH:
            raise _refused("result", f"is nested deeper than {MAX_DEPTH} levels; return less")
        if isinstance(value, BaseModel):
            return self.of(_dumped(value, place), place, depth + 1)
        return self._collection(value, place, depth)

    def _collection(self, value: Any, place: str, depth: int) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        if isinstance(value, Mapping):
            return {
                self._key(key, place): self.of(one, f"{place}.{key}", depth + 1)
                for key, one in value.items()
            }
        if isinstance(value, list | tuple | AbstractSet | Iterator):
            return [self.of(one, f"{place}[{i}]", depth + 1) for i, one in enumerate(value)]
        return self.of(_leaf(value, place), place, depth + 1)

    def _key(self, key: Any, place: str) -> str:
        if isinstance(key, str):
            self._spend(len(key))
            return _text(str.__str__(key), f"{place}'s keys")
        if key is None or isinstance(key, bool | int | float):
            return json.dumps(key if key is None else _number(key, place))
        raise _refused(place, f"has a key of type {type(key).__name__}; use text keys")

    def _spend(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise _too_large(self.limit)


def _text(text: str, place: str) -> str:
    if not text.isascii() and not is_unicode(text):
        raise _refused(
            place, "holds a lone surrogate; decode with errors='replace', or return base64"
        )
    return text


def _number(value: float, place: str) -> float:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        if abs(value) >= _INT_BOUND:
            raise _refused(place, f"has more than {MAX_DIGITS} digits; return it as text")
        return int(value)
    if not math.isfinite(value):
        raise _refused(place, f"is {value}, which JSON does not have; return None or text")
    return float(value)


def _dumped(value: BaseModel, place: str) -> Any:
    try:
        return value.model_dump(mode="json", by_alias=True)
    except (PydanticSerializationError, ValueError, TypeError, AttributeError) as error:
        raise _refused(place, f"cannot be written as JSON: {error}") from None


def _leaf(value: Any, place: str) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    try:
        return to_jsonable_python(value)
    except (PydanticSerializationError, ValueError, TypeError, AttributeError, OverflowError):
        # Those of types that look like ones that pydantic knows: pandas's NaT is a datetime.
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise _refused(
            place, f"is of type {kind}; return text, numbers, lists, dicts or pydantic models"
        ) from None


def _refused(place: str, why: str) -> ToolExecutionError:
    return ToolExecutionError(f"the tool's {place} {why}")


def _too_large(limit: int) -> ToolExecutionError:
    return ToolExecutionError(
        f"the tool's result is larger than the limit of {limit} bytes; return less (a part, a "
        "summary or a reference), or ask for less"
    )
