"""Makes validators of JSON Schemas bounded: no schema and no data gives them endless work.

Patterns match in linear time (`patterns`), and a check that takes too long is given up. No schema
inside another one leads back to jsonschema's own classes, which know no such bounds. Knows
neither tools nor answers; `checks` describes the problems of data.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from itertools import islice
from typing import Any

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
from stepfleet.orchestrator.tools.schemas.unevaluated import (
    unevaluated_items,
    unevaluated_properties,
)

Found = Callable[[str, str], bool]
"""Returns whether a pattern is found in a text."""

MOST_PARTS = 5_000
"""Objects and arrays of a schema: to check its own form takes up to 0.3 ms for each."""
MOST_CHARACTERS = 1024 * 1024
_NAMES = 3
_LONGEST_MESSAGE = 600
_FIELDS = (
    ("schema", "schema"),
    ("_ref_resolver", "resolver"),
    ("format_checker", "format_checker"),
    ("_registry", "registry"),
    ("_resolver", "_resolver"),
)
"""Attributes of jsonschema's validators, and the arguments that set them."""


def validator_for(schema: Any, default: Any, *, lenient: bool = False) -> Any:
    """Return the bounded class for a schema: that of its `$schema`, else that of `default`.

    `default` is one of jsonschema's classes.
    """
    import jsonschema  # noqa: PLC0415 - it takes longer than all of this package

    named = schema.get("$schema") if isinstance(schema, Mapping) else None
    known: Any = default
    if isinstance(named, str):
        with suppress(ValueError):  # no address at all
            known = jsonschema.validators.validator_for({"$schema": named}, default=default)
    return bounded(known, lenient=lenient)


@cache
def bounded(kind: Any, *, lenient: bool = False) -> Any:
    """Return jsonschema's validator class `kind` with bounded keywords, also for schemas inside.

    A pattern that cannot be matched in linear time raises `ConfigurationError` when it is met;
    with `lenient` it is taken to match, for data that somebody else will check again.
    """
    import jsonschema  # noqa: PLC0415 - as above

    found = _matches_or_unknown if lenient else _matches
    keywords: dict[str, Any] = {
        **kind.VALIDATORS,
        "pattern": partial(_pattern, found),
        "patternProperties": partial(_pattern_properties, found),
        "additionalProperties": partial(_additional_properties, found),
        "uniqueItems": _unique_items,
    }
    if "unevaluatedProperties" in keywords:
        keywords["unevaluatedProperties"] = partial(unevaluated_properties, found)
        keywords["unevaluatedItems"] = unevaluated_items
        keywords["dependencies"] = jsonschema.Draft7Validator.VALIDATORS["dependencies"]
    extend: Any = jsonschema.validators.extend
    made = extend(kind, {name: _watched(keyword) for name, keyword in keywords.items()})

    def evolve(self: Any, **changes: Any) -> Any:
        """Return a validator of a schema inside; jsonschema's own would leave this class."""
        tick()
        schema = changes.get("schema", self.schema)
        dialect = isinstance(schema, Mapping) and "$schema" in schema
        cls = validator_for(schema, kind, lenient=lenient) if dialect else made
        given = {alias: getattr(self, name) for name, alias in _FIELDS if alias not in changes}
        return cls(**given, **changes)

    made.evolve = evolve
    return made


def validator_of(kind: Any, schema: Mapping[str, Any]) -> Any:
    """Return a validator of `schema` by a bounded class. Nothing is ever fetched.

    Raises `ConfigurationError` that names the problem of the schema.
    """
    check_budget(schema)
    try:
        wrong = errors_of(_of_metaschema(kind), schema, 1)
        made = None if wrong else kind(schema, registry=_registry_of(kind, schema))
    except RecursionError:
        raise ConfigurationError("is nested too deeply to be checked") from None
    except TooMuchWorkError:
        raise ConfigurationError("takes too long to be checked; make it smaller") from None
    except SlowCheckError:
        raise
    except Exception as error:  # noqa: BLE001 - any failure of two libraries
        raise ConfigurationError(f"cannot be used: {repr(error)[:200]}") from None
    if wrong:
        place = ".".join(map(str, wrong[0].absolute_path)) or "<root>"
        raise ConfigurationError(f"is no valid JSON Schema: {place}: {wrong[0].message}")
    return made


def check_budget(schema: Any) -> int:
    """Return the number of a schema's parts. Linear in the schema, before anything is made of it.

    Counts every part of the document, also those that are no schema: parts outside the walk would
    have no bound. Raises `ConfigurationError` that names the bound.
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
    """Return the characters that a part has itself, with 1 for each value that is no text."""
    if isinstance(part, Mapping):
        names = sum(len(one) if isinstance(one, str) else 1 for one in part)
        part = part.values()
    else:
        names = 0
    return names + sum(len(one) if isinstance(one, str) else 1 for one in part)


def _registry_of(kind: Any, schema: Mapping[str, Any]) -> Any:
    """Return a registry of the schema's own parts: one of a metaschema looks for them there."""
    import referencing.jsonschema  # noqa: PLC0415 - as above

    dialect = referencing.jsonschema.specification_with(kind.ID_OF(kind.META_SCHEMA))
    resource = dialect.create_resource(schema)
    registry: Any = referencing.Registry()
    registry = registry.with_resource(resource.id() or "", resource)
    with suppress(AttributeError):  # `referencing` cannot walk each form of draft 3
        registry = registry.crawl()
    return registry


@cache
def _of_metaschema(kind: Any) -> Any:
    import referencing  # noqa: PLC0415 - as above

    # No format checker: it would compile patterns with Python's engine.
    return kind(kind.META_SCHEMA, registry=referencing.Registry())


def errors_of(validator: Any, data: Any, most: int) -> list[Any]:
    """Return at most `most` errors of data under a bounded validator.

    Raises `TooMuchWorkError` after two seconds of work, and all exceptions of the validator.
    """
    with limited():
        try:
            return list(islice(validator.iter_errors(data), most))
        except TooMuchMatchingError:
            raise TooMuchWorkError from None


def _watched(keyword: Callable[..., Any]) -> Callable[..., Any]:
    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        tick()
        for error in keyword(validator, value, instance, schema) or ():
            # Messages hold the data, and those of alternatives are kept until the last one.
            if len(error.message) > _LONGEST_MESSAGE:
                half = _LONGEST_MESSAGE // 2
                error.message = f"{error.message[:half]} ... {error.message[-half:]}"
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
    import jsonschema  # noqa: PLC0415 - as above

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
    import jsonschema  # noqa: PLC0415 - as above

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
    import jsonschema  # noqa: PLC0415 - as above

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
