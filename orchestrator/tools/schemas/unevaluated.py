"""`unevaluatedProperties` and `unevaluatedItems` of JSON Schema, within the bounds of `time_limit`.

jsonschema's own match names by Python's engine, and look each one up in a list. Here names are
matched by the caller's function, and looked up in sets. Knows no bounded classes: it goes into
schemas inside by the validator's own `evolve` and `descend`, which keep to theirs.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stepfleet.orchestrator.tools.schemas.time_limit import tick

_SHOWN = 3
_REFERENCES = ("$ref", "$dynamicRef")
_IN_PLACE = ("allOf", "anyOf", "oneOf")
_OTHER_NAMES = ("additionalProperties", "unevaluatedProperties")


def unevaluated_properties(
    found: Callable[[str, str], bool], validator: Any, rule: Any, instance: Any, schema: Any
) -> Iterator[Any]:
    """Yield the problems of the properties that no other keyword of `schema` covers.

    `found` decides whether a pattern is found in a name.
    """
    if not validator.is_type(instance, "object"):
        return
    own = {keyword: value for keyword, value in schema.items() if keyword != _OTHER_NAMES[1]}
    names: set[str] = set()
    _cover_names(found, validator, own, instance, names)
    left = [name for name in instance if name not in names]
    yield from _judged("properties", validator, rule, instance, left)


def unevaluated_items(validator: Any, rule: Any, instance: Any, schema: Any) -> Iterator[Any]:
    """Yield the problems of the items that no other keyword of `schema` covers."""
    if not validator.is_type(instance, "array"):
        return
    own = {keyword: value for keyword, value in schema.items() if keyword != "unevaluatedItems"}
    places: set[int] = set()
    _cover_items(validator, own, instance, places)
    left = [place for place in range(len(instance)) if place not in places]
    yield from _judged("items", validator, rule, instance, left)


def _judged(kind: str, validator: Any, rule: Any, instance: Any, left: list[Any]) -> Iterator[Any]:
    import jsonschema  # noqa: PLC0415 - it takes longer than all of this package

    if rule is False and left:
        shown = ", ".join(repr(one) for one in left[:_SHOWN])
        yield jsonschema.ValidationError(f"unevaluated {kind} are not allowed ({shown})")
    elif rule is not False:
        for one in left:
            yield from validator.descend(instance[one], rule, path=one)


def _cover_names(
    found: Callable[[str, str], bool],
    validator: Any,
    schema: Any,
    instance: Mapping[str, Any],
    names: set[str],
) -> None:
    """Add the names that a schema covers, for which `instance` is taken to be valid."""
    schema = _applied(validator, schema)
    if any(keyword in schema for keyword in _OTHER_NAMES):
        names.update(instance)
    if len(names) == len(instance):
        return
    names.update(name for name in schema.get("properties", ()) if name in instance)
    for pattern in schema.get("patternProperties", ()):
        names.update(one for one in instance if one not in names and found(pattern, one))
    for inner, part in _in_place(validator, schema, instance):
        _cover_names(found, inner, part, instance, names)


def _cover_items(validator: Any, schema: Any, instance: list[Any], places: set[int]) -> None:
    """Add the places that a schema covers, for which `instance` is taken to be valid."""
    schema = _applied(validator, schema)
    items = schema.get("items")
    tuples = items if isinstance(items, list) else schema.get("prefixItems", ())
    others = "additionalItems" if isinstance(items, list) else "items"
    if others in schema or "unevaluatedItems" in schema:
        places.update(range(len(instance)))
    if len(places) == len(instance):
        return
    places.update(range(min(len(tuples), len(instance))))
    if "contains" in schema and "prefixItems" in validator.VALIDATORS:  # not in 2019-09
        inner = _inside(validator, schema["contains"])
        places.update(n for n, one in enumerate(instance) if inner.is_valid(one))
    for inner, part in _in_place(validator, schema, instance):
        _cover_items(inner, part, instance, places)


def _applied(validator: Any, schema: Any) -> Mapping[str, Any]:
    """Return the keywords of a schema that its dialect knows."""
    tick()
    if not isinstance(schema, Mapping):
        return {}
    known = validator.VALIDATORS
    if "$ref" in schema and _OTHER_NAMES[1] not in known:  # before 2019-09 it stands alone
        return {"$ref": schema["$ref"]}
    conditional = ("then", "else") if "if" in known else ()
    return {name: one for name, one in schema.items() if name in known or name in conditional}


def _in_place(
    validator: Any, schema: Mapping[str, Any], instance: Any
) -> Iterator[tuple[Any, Any]]:
    """Yield the schemas that apply to `instance` itself, each with its validator."""
    for resolved in _resolved(validator, schema):
        inner = validator.evolve(schema=resolved.contents, _resolver=resolved.resolver)
        yield inner, resolved.contents
    for part in _dependents(schema, instance):
        yield _inside(validator, part), part
    for keyword in _IN_PLACE:
        for part in schema.get(keyword, ()):
            inner = _inside(validator, part)
            if keyword == "allOf" or inner.is_valid(instance):
                yield inner, part
    if "if" in schema:
        condition = _inside(validator, schema["if"])
        holds = condition.is_valid(instance)
        if holds:
            yield condition, schema["if"]
        if (branch := "then" if holds else "else") in schema:
            yield _inside(validator, schema[branch]), schema[branch]


def _resolved(validator: Any, schema: Mapping[str, Any]) -> Iterator[Any]:
    import referencing.jsonschema  # noqa: PLC0415 - as above

    for keyword in _REFERENCES:
        if keyword in schema:
            yield validator._resolver.lookup(schema[keyword])  # noqa: SLF001 - no public name
    if "$recursiveRef" in schema:
        yield referencing.jsonschema.lookup_recursive_ref(validator._resolver)  # noqa: SLF001


def _dependents(schema: Mapping[str, Any], instance: Any) -> Iterator[Any]:
    if not isinstance(instance, Mapping):
        return
    for keyword in ("dependentSchemas", "dependencies"):
        for name, part in schema.get(keyword, {}).items():
            if name in instance and not isinstance(part, list):
                yield part


def _inside(validator: Any, schema: Any) -> Any:
    """Return a validator of a schema inside another one."""
    import referencing.jsonschema  # noqa: PLC0415 - as above

    dialect = referencing.jsonschema.specification_with(validator.ID_OF(validator.META_SCHEMA))
    resolver = validator._resolver.in_subresource(dialect.create_resource(schema))  # noqa: SLF001
    return validator.evolve(schema=schema, _resolver=resolver)
