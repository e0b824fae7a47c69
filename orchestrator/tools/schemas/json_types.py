"""Decides whether values of a type can come from JSON at all, by what pydantic made of the type.

A type may have a JSON Schema and accept nothing that JSON can hold: a tool with one could never
be called. Knows no tools.
"""

from collections.abc import Iterator, Mapping
from typing import Any

_TEXT = "the keys of an object are text in JSON; use str, int, a date or an enum"
_NO_KEYS = {
    *("tuple", "list", "set", "frozenset", "dict", "generator", "none"),
    *("model", "dataclass", "typed-dict", "named-tuple"),
}
_BY_CODE = {"function-before", "function-wrap", "function-plain", "chain"}
"""Code of the user's sees the value first, and may make anything of it."""
_INSIDE = ("schema", "items_schema", "keys_schema", "values_schema")
_REASONS = {
    "is-subclass": "a class cannot come from JSON; use str, and look the class up",
    "is-instance": "instances of it cannot come from JSON; use a type with fields or values",
    "callable": "a function cannot come from JSON; use str, and look the function up",
    "generator": "its items would be checked while the tool runs; use list[...]",
}
Core = Mapping[str, Any]


_ANY: Core = {"type": "any"}


def why_never(core: Core, field: str) -> str | None:
    """Return why nothing in JSON is a value of a model's field; None where something may be.

    `core` is the model's core schema.
    """
    kinds = {one["ref"]: one for one in core.get("definitions", ())}
    while "fields" not in core:
        core = kinds[core["schema_ref"]] if core["type"] == "definition-ref" else core["schema"]
    return _why(core["fields"][field]["schema"], kinds, frozenset())


def _why(core: Core, kinds: Mapping[str, Core], above: frozenset[str]) -> str | None:
    kind = core["type"]
    if kind in _BY_CODE:
        return None
    if kind == "definition-ref":
        name = core["schema_ref"]
        return None if name in above else _why(kinds.get(name, _ANY), kinds, above | {name})
    if kind == "union":
        choices = [_why(_choice(one), kinds, above) for one in core["choices"]]
        return choices[0] if choices and all(choices) else None
    if kind == "literal" and not [one for one in core["expected"] if not isinstance(one, bytes)]:
        return "bytes are no values of JSON; use text"
    if kind == "dict" and (why := _why_no_key(core.get("keys_schema", _ANY), kinds)):
        return why
    own = _REASONS.get(kind)
    return own or next(filter(None, (_why(one, kinds, above) for one in _inner(core))), None)


def _why_no_key(core: Core, kinds: Mapping[str, Core]) -> str | None:
    kind = core["type"]
    if kind == "definition-ref":
        return _why_no_key(kinds.get(core["schema_ref"], _ANY), kinds)
    if kind == "union":
        choices = [_why_no_key(_choice(one), kinds) for one in core["choices"]]
        return choices[0] if choices and all(choices) else None
    if kind == "literal":
        return None if any(isinstance(one, str) for one in core["expected"]) else _TEXT
    if kind in _NO_KEYS:
        return _TEXT
    return next(filter(None, (_why_no_key(one, kinds) for one in _of_json(core))), None)


def _choice(choice: Any) -> Core:
    found: Core = choice[0] if isinstance(choice, tuple) else choice
    return found


def _of_json(core: Core) -> Iterator[Core]:
    """Yield the schema that a wrapper applies to JSON."""
    if core["type"] in _BY_CODE:
        return
    for name in ("json_schema", "strict_schema", "schema"):
        if isinstance(inner := core.get(name), Mapping) and "type" in inner:
            yield inner
            return


def _inner(core: Core) -> Iterator[Core]:
    """Yield the schemas of the parts that every value has."""
    if core["type"] in ("json-or-python", "lax-or-strict"):
        yield from _of_json(core)
        return
    for name in _INSIDE:
        one = core.get(name)
        if isinstance(one, Mapping) and "type" in one:
            yield one
        elif isinstance(one, list):
            yield from one
    fields = core.get("fields")
    parts = fields.values() if isinstance(fields, Mapping) else fields or ()
    for part in parts:  # a dataclass has their names beside them
        if isinstance(part, Mapping) and part.get("required", part["schema"]["type"] != "default"):
            yield part["schema"]
