"""Walks the schemas inside a JSON Schema. Knows which keywords hold schemas, and nothing else."""

from collections.abc import Callable, Iterator
from typing import Any

Schema = dict[str, Any]

NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependencies")
LISTED = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
SINGLE = (
    "items",
    "additionalItems",
    "additionalProperties",
    "propertyNames",
    "contains",
    "not",
    "if",
    "then",
    "else",
)


def changed(schema: Any, change: Callable[[Schema], Schema]) -> Any:
    """Return a copy of `schema` in which each schema, the innermost first, went through `change`.

    The schemas `true` and `false`, and whatever is no schema, stay as they are.
    """
    if not isinstance(schema, dict):
        return schema
    copied = dict(schema)
    for keyword in NAMED:
        if isinstance(schema.get(keyword), dict):
            named = schema[keyword].items()
            copied[keyword] = {name: changed(one, change) for name, one in named}
    for keyword in LISTED:
        if isinstance(schema.get(keyword), list):
            copied[keyword] = [changed(one, change) for one in schema[keyword]]
    for keyword in SINGLE:
        if isinstance(schema.get(keyword), dict):
            copied[keyword] = changed(schema[keyword], change)
    return change(copied)


def each(schema: Any) -> Iterator[Schema]:
    """Yield `schema` and all schemas inside it, the very objects."""
    if not isinstance(schema, dict):
        return
    yield schema
    inner: list[Any] = [schema.get(keyword) for keyword in SINGLE]
    for keyword in NAMED:
        named = schema.get(keyword)
        inner += named.values() if isinstance(named, dict) else ()
    for keyword in LISTED:
        listed = schema.get(keyword)
        inner += listed if isinstance(listed, list) else ()
    for one in inner:
        yield from each(one)
