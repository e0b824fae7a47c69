"""The types of a request's fields, checked before anything reads them. Pure.

A shape is a type (`object` for anything), a set of words, `[shape]` for a list, a tuple for one of
several, a dict for an object's fields (optional ones end with "?"; null is absent), or `Tagged`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_NAMES = {
    str: "a string", bool: "a boolean", int: "an integer", float: "a number", dict: "an object",
    list: "an array",
}  # fmt: skip


@dataclass(frozen=True)
class Tagged:
    """An object whose field `type` says which fields it has; `usual` is the one without it."""

    kinds: Mapping[str, dict[str, Any]]
    usual: str | None = None


Misfit = tuple[str, str]


def misfit(value: Any, shape: Any, place: str = "", index: str = "[{}]") -> Misfit | None:
    """Return place and reason of the first value that does not fit, or None.

    `index` is the form of a list's index in a place.
    """
    if isinstance(shape, tuple):
        found = [misfit(value, one, place, index) for one in shape]
        inner = (one for one in found if one and one[0] != place)
        return None if None in found else next(inner, found[0])
    if isinstance(shape, frozenset):
        fits = isinstance(value, str) and value in shape
        return None if fits else (place, f"must be one of {', '.join(sorted(shape))}")
    if isinstance(shape, list):
        return _misfit_in_list(value, shape[0], place, index)
    if isinstance(shape, Tagged):
        return _misfit_of_kind(value, shape, place, index)
    if isinstance(shape, dict):
        return _misfit_in_object(value, shape, place, index)
    is_number = isinstance(value, bool) and shape in (int, float)
    fits = isinstance(value, int | float if shape is float else shape) and not is_number
    return None if fits else (place, f"must be {_NAMES.get(shape, shape)}")


def _misfit_in_list(value: Any, shape: Any, place: str, index: str) -> Misfit | None:
    if not isinstance(value, list):
        return place, "must be an array"
    found = (misfit(one, shape, place + index.format(i), index) for i, one in enumerate(value))
    return next((one for one in found if one), None)


def _misfit_in_object(
    value: Any, fields: Mapping[str, Any], place: str, index: str
) -> Misfit | None:
    if not isinstance(value, dict):
        return place, "must be an object"
    for field, shape in fields.items():
        name = field.removesuffix("?")
        inner = f"{place}.{name}" if place else name
        if value.get(name) is None:
            if name == field:
                return inner, "Field required"
        elif found := misfit(value[name], shape, inner, index):
            return found
    return None


def _misfit_of_kind(value: Any, shape: Tagged, place: str, index: str) -> Misfit | None:
    kind = value.get("type", shape.usual) if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in shape.kinds:
        known = ", ".join(map(repr, shape.kinds))
        return f"{place}.type", f"Invalid value: {str(kind)[:80]!r}. Supported values are: {known}"
    return _misfit_in_object(value, shape.kinds[kind], place, index)
