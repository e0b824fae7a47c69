"""Validators of JSON Schemas by jsonschema, bounded: no schema and no data gives them endless work.

Patterns match in linear time (`patterns`), and a check that takes too long is given up. No schema
inside another one leads back to jsonschema's own classes, which know no such bounds. Its
`unevaluatedProperties` and `unevaluatedItems` are replaced: they match names by Python's engine,
and look each one up in a list. Knows neither tools nor answers; `checks` describes the problems
of data.

Import this module where it is first used: jsonschema takes longer than all of this package.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from itertools import islice
from typing import Any

import jsonschema
import referencing
import referencing.exceptions
import referencing.jsonschema

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.tools.schemas.bounded_json import MAX_DEPTH, canonical_json
from stepfleet.orchestrator.tools.schemas.patterns import (
    TooMuchMatchingError,
    check_patterns,
    matches,
    patterns_of,
)
from stepfleet.orchestrator.tools.schemas.time_limit import (
    SlowCheckError,
    TooMuchWorkError,
    limited,
    tick,
)

Found = Callable[[str, str], bool]
"""Returns whether a pattern is found in a text."""

MOST_PARTS = 5_000
"""Objects and arrays of a schema: to check its own form takes up to 0.3 ms for each."""
MOST_CHARACTERS = 1024 * 1024
_NAMES = 3
_drafts: Any = jsonschema.validators
_LONGEST_MESSAGE = 600
_FIELDS = (
    ("schema", "schema"),
    ("_ref_resolver", "resolver"),
    ("format_checker", "format_checker"),
    ("_registry", "registry"),
    ("_resolver", "_resolver"),
)
"""Attributes of jsonschema's validators, and the arguments that set them."""


DRAFT_7 = "http://json-schema.org/draft-07/schema#"
LATEST = "https://json-schema.org/draft/2020-12/schema"


def validator_of(schema: Mapping[str, Any], *, default: str = LATEST, lenient: bool = False) -> Any:
    """Return the bounded validator of a schema, in the draft of its `$schema` or else `default`.

    Nothing is ever fetched. A pattern that cannot be matched in linear time raises
    `ConfigurationError` when it is met; with `lenient` it is taken to match, for data that somebody
    else will check again. Raises `ConfigurationError` that names the problem of the schema.
    """
    check_budget(schema)
    kind = _kind_of(schema, _drafts.validator_for({"$schema": default}), lenient=lenient)
    try:
        wrong = errors_of(_of_metaschema(kind), schema, 1)
        with _panics_are_errors():
            made = None if wrong else kind(schema, registry=_registry_of(kind, schema))
    except RecursionError:
        raise ConfigurationError("is nested too deeply to be checked") from None
    except TooMuchWorkError:
        raise ConfigurationError("takes too long to be checked; make it smaller") from None
    except (SlowCheckError, ConfigurationError):
        raise
    except Exception as error:  # noqa: BLE001 - any failure of two libraries
        raise _unusable(error) from None
    if wrong:
        place = ".".join(map(str, wrong[0].absolute_path)) or "<root>"
        raise ConfigurationError(f"is not valid: {place}: {wrong[0].message}")
    return made


@contextmanager
def _panics_are_errors() -> Iterator[None]:
    """Raise `RecursionError` where jsonschema's mappings, which are in Rust, run out of stack.

    They raise a `BaseException` for that, which `except Exception` does not catch.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RecursionError("references without end") from None


def _unusable(error: Exception) -> ConfigurationError:
    return ConfigurationError(f"cannot be used: {repr(error)[:200]}")


def _kind_of(schema: Any, default: Any, *, lenient: bool = False) -> Any:
    """Return the bounded class of a schema's draft; `default` is one of jsonschema's classes."""
    named = schema.get("$schema") if isinstance(schema, Mapping) else None
    known: Any = default
    if isinstance(named, str):
        with suppress(ValueError):  # no address at all
            known = _drafts.validator_for({"$schema": named}, default=default)
    return _bounded(known, lenient=lenient)


@cache
def _bounded(kind: Any, *, lenient: bool = False) -> Any:
    """Return jsonschema's validator class `kind` with bounded keywords, also for schemas inside."""
    found = _matches_or_unknown if lenient else _matches
    keywords: dict[str, Any] = {
        **kind.VALIDATORS,
        "pattern": partial(_pattern, found),
        "patternProperties": partial(_pattern_properties, found),
        "additionalProperties": partial(_additional_properties, found),
        "uniqueItems": _unique_items,
    }
    if "unevaluatedProperties" in keywords:
        keywords["unevaluatedProperties"] = partial(_unevaluated_properties, found)
        keywords["unevaluatedItems"] = _unevaluated_items
        keywords["dependencies"] = jsonschema.Draft7Validator.VALIDATORS["dependencies"]
    made = _drafts.extend(kind, {name: _watched(keyword) for name, keyword in keywords.items()})

    def evolve(self: Any, **changes: Any) -> Any:
        """Return a validator of a schema inside; jsonschema's own would leave this class."""
        tick()
        schema = changes.get("schema", self.schema)
        dialect = isinstance(schema, Mapping) and "$schema" in schema
        cls = _kind_of(schema, kind, lenient=lenient) if dialect else made
        given = {alias: getattr(self, name) for name, alias in _FIELDS if alias not in changes}
        return cls(**given, **changes)

    made.evolve = evolve
    return made


def check_budget(schema: Any) -> int:
    """Return the number of a schema's parts. Linear in the schema, before anything is made of it.

    Counts every part of the document, also those outside schemas, which references may
    reach. Raises `ConfigurationError` that names the bound.
    """
    count = characters = 0
    patterns: list[str] = []
    for part, depth in _parts(schema):
        count += 1
        characters += _own_characters(part)
        if depth > MAX_DEPTH:
            raise ConfigurationError("is nested too deeply to be checked")
        if count > MOST_PARTS:
            raise ConfigurationError(f"has more than {MOST_PARTS} objects and arrays; use fewer")
        if characters > MOST_CHARACTERS:
            raise ConfigurationError(f"has more than {MOST_CHARACTERS} characters; use fewer")
        if isinstance(part, Mapping):
            patterns += patterns_of(part)
    check_patterns(patterns)
    return count


def _parts(schema: Any) -> Iterator[tuple[Any, int]]:
    """Yield every object and array with its depth; without recursion."""
    waiting = [(schema, 0)]
    while waiting:
        part, depth = waiting.pop()
        if not isinstance(part, Mapping | list | tuple):
            continue
        yield part, depth
        inner = part.values() if isinstance(part, Mapping) else part
        waiting += [(one, depth + 1) for one in inner]


def _own_characters(part: Any) -> int:
    """Return the characters that a part has itself, with 1 for each value other than text."""
    if isinstance(part, Mapping):
        names = sum(len(one) if isinstance(one, str) else 1 for one in part)
        part = part.values()
    else:
        names = 0
    return names + sum(len(one) if isinstance(one, str) else 1 for one in part)


def _registry_of(kind: Any, schema: Mapping[str, Any]) -> Any:
    """Return a registry of the schema's own parts: one of a metaschema looks for them there."""
    dialect = referencing.jsonschema.specification_with(kind.ID_OF(kind.META_SCHEMA))
    resource = dialect.create_resource(schema)
    registry: Any = referencing.Registry()
    registry = registry.with_resource(resource.id() or "", resource)
    with suppress(AttributeError):  # `referencing` cannot walk each form of draft 3
        registry = registry.crawl()
    return registry


@cache
def _of_metaschema(kind: Any) -> Any:
    # No format checker: it would compile patterns with Python's engine.
    return kind(kind.META_SCHEMA, registry=referencing.Registry())


def errors_of(validator: Any, data: Any, most: int) -> list[Any]:
    """Return at most `most` errors of data under a bounded validator.

    Raises `TooMuchWorkError` after two seconds of work, `RecursionError` for references without
    end, and `ConfigurationError` where the schema cannot be used.
    """
    try:
        with _panics_are_errors(), limited():
            return list(islice(validator.iter_errors(data), most))
    except TooMuchMatchingError:
        raise TooMuchWorkError from None
    except referencing.exceptions.Unresolvable as error:
        raise ConfigurationError(f"refers to {error.ref!r}, which it does not hold") from None
    except (TooMuchWorkError, SlowCheckError, RecursionError, ConfigurationError):
        raise
    except Exception as error:  # noqa: BLE001 - as above
        raise _unusable(error) from None


def _watched(keyword: Callable[..., Any]) -> Callable[..., Any]:
    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        tick()
        for error in keyword(validator, value, instance, schema) or ():
            # Messages hold the data, and those of alternatives are kept until the last one.
            if len(error.message) > _LONGEST_MESSAGE:
                half = _LONGEST_MESSAGE // 2
                error.message = f"{error.message[:half]} ... {error.message[-half:]}"
                error.args = ()  # the whole message once more
            yield error

    return check


def _matches(pattern: str, text: str) -> bool:
    tick()
    return matches(pattern, text)


def _matches_or_unknown(pattern: str, text: str) -> bool:
    try:
        return _matches(pattern, text)
    except ConfigurationError:
        return True


def _pattern(found: Found, validator: Any, pattern: Any, instance: Any, _: Any) -> Iterator[Any]:
    if validator.is_type(instance, "string") and not found(pattern, instance):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(
    found: Found, validator: Any, patterns: Any, instance: Any, _: Any
) -> Iterator[Any]:
    if not validator.is_type(instance, "object"):
        return
    for pattern, schema in patterns.items():
        for name, value in instance.items():
            if found(pattern, name):
                yield from validator.descend(value, schema, path=name, schema_path=pattern)


def _additional_properties(
    found: Found, validator: Any, allowed: Any, instance: Any, schema: Any
) -> Iterator[Any]:
    if not validator.is_type(instance, "object"):
        return
    patterns = schema.get("patternProperties", {})
    extra = [
        name
        for name in instance
        if name not in schema.get("properties", {})
        and not any(found(pattern, name) for pattern in patterns)
    ]
    if validator.is_type(allowed, "object"):
        for name in extra:
            yield from validator.descend(instance[name], allowed, path=name)
    elif allowed is False and extra:
        names = ", ".join(repr(name) for name in extra[:_NAMES])
        yield jsonschema.ValidationError(f"additional properties are not allowed ({names})")


def _unique_items(validator: Any, wanted: Any, instance: Any, _: Any) -> Iterator[Any]:
    if not wanted or not validator.is_type(instance, "array"):
        return
    if len({canonical_json(_one_number(item)) for item in instance}) < len(instance):
        yield jsonschema.ValidationError(f"{instance!r} has items that are equal")


def _one_number(value: Any) -> Any:
    """Write 1.0 as 1: they are one number in JSON Schema."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _one_number(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_one_number(one) for one in value]
    return value


_REFERENCES = ("$ref", "$dynamicRef")
_IN_PLACE = ("allOf", "anyOf", "oneOf")
_OTHER_NAMES = ("additionalProperties", "unevaluatedProperties")


def _unevaluated_properties(
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


def _unevaluated_items(validator: Any, rule: Any, instance: Any, schema: Any) -> Iterator[Any]:
    """Yield the problems of the items that no other keyword of `schema` covers."""
    if not validator.is_type(instance, "array"):
        return
    own = {keyword: value for keyword, value in schema.items() if keyword != "unevaluatedItems"}
    places: set[int] = set()
    _cover_items(validator, own, instance, places)
    left = [place for place in range(len(instance)) if place not in places]
    yield from _judged("items", validator, rule, instance, left)


def _judged(kind: str, validator: Any, rule: Any, instance: Any, left: list[Any]) -> Iterator[Any]:
    if rule is False and left:
        shown = ", ".join(repr(one) for one in left[:_NAMES])
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
    dialect = referencing.jsonschema.specification_with(validator.ID_OF(validator.META_SCHEMA))
    resolver = validator._resolver.in_subresource(dialect.create_resource(schema))  # noqa: SLF001
    return validator.evolve(schema=schema, _resolver=resolver)
