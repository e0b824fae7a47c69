"""Makes validators of JSON Schemas bounded: no schema and no data gives them endless work.

Patterns match in linear time (`patterns`), and a check that takes too long is given up. Knows
neither tools nor answers; what is wrong with data is told elsewhere.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cache, partial
from itertools import islice
from typing import Any

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.tools.bounded_json import canonical_json
from stepfleet.orchestrator.tools.patterns import matches

LONGEST_CHECK = 2.0
"""Seconds of CPU time that one check may take; sane schemas and data take milliseconds."""

Found = Callable[[str, str], bool]
"""Tells whether a pattern is found in a text."""

_NAMES = 3
_until: ContextVar[float] = ContextVar("stepfleet_schema_check_until")


class TooMuchWorkError(Exception):
    """A check takes too long."""


@cache
def bounded(kind: Any, *, lenient: bool = False) -> Any:
    """Return jsonschema's validator class `kind` with bounded keywords.

    A pattern that cannot be matched in linear time raises `ConfigurationError` when it is met;
    with `lenient` it is taken to match, for data that somebody else will check again.
    """
    import jsonschema  # noqa: PLC0415 - it takes longer than all of this package

    found = _matches_or_unknown if lenient else matches
    keywords: dict[str, Any] = {
        **kind.VALIDATORS,
        "pattern": partial(_pattern, found),
        "patternProperties": partial(_pattern_properties, found),
        "additionalProperties": partial(_additional_properties, found),
        "uniqueItems": _unique_items,
    }
    if "unevaluatedProperties" in keywords:
        keywords["unevaluatedProperties"] = partial(_unevaluated, keywords["unevaluatedProperties"])
    extend: Any = jsonschema.validators.extend
    return extend(kind, {name: _watched(keyword) for name, keyword in keywords.items()})


def errors_of(validator: Any, data: Any, most: int) -> list[Any]:
    """Return at most `most` errors of data under a bounded validator.

    Raises `TooMuchWorkError` after two seconds of work, and what the validator raises.
    """
    token = _until.set(time.thread_time() + LONGEST_CHECK)
    try:
        return list(islice(validator.iter_errors(data), most))
    finally:
        _until.reset(token)


def _watched(keyword: Callable[..., Any]) -> Callable[..., Any]:
    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        if time.thread_time() > _until.get(float("inf")):
            raise TooMuchWorkError
        return keyword(validator, value, instance, schema)

    return check


def _matches_or_unknown(pattern: str, text: str) -> bool:
    try:
        return matches(pattern, text)
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


def _unevaluated(
    own: Callable[..., Any], validator: Any, value: Any, instance: Any, schema: Any
) -> Any:
    """Leave the keyword to jsonschema, which matches patterns beside it by Python's engine."""
    if "patternProperties" in json.dumps(schema):
        raise ConfigurationError(
            "a schema with unevaluatedProperties and patternProperties cannot be used; "
            "write additionalProperties instead"
        )
    return own(validator, value, instance, schema)


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
