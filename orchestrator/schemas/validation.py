"""Checks data against a JSON Schema of Draft 7, within bounds, and says what is wrong with it.

Patterns match in linear time, and a check that takes too long is given up: no schema and no
data makes it endless. Nothing is fetched.
"""

import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import lru_cache
from itertools import islice
from typing import Any

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.schemas.patterns import matches
from stepfleet.orchestrator.schemas.subschemas import Schema, changed
from stepfleet.orchestrator.tools.bounded_json import canonical_json

SHOWN = 3
"""Problems that are told in words; the others are counted."""
COUNTED = 100
LONGEST_CHECK = 2.0
"""Seconds of CPU time that one check may take; sane schemas and answers take milliseconds."""

_LONGEST_MESSAGE = 200
_until: ContextVar[float] = ContextVar("stepfleet_schema_check_until")


class _TooMuchWork(Exception):  # noqa: N818 - it never leaves this module
    """A check takes too long."""


def validator_of(schema: Schema) -> Any:
    """Return what `problems_of` needs. Raises `ConfigurationError` for what is no JSON Schema."""
    # Imported on first use: it takes longer than all of this package.
    import jsonschema  # noqa: PLC0415
    import referencing  # noqa: PLC0415

    kind = _bounded_draft_7()
    try:
        # No format checker: it would compile patterns with Python's engine.
        kind.check_schema(schema, format_checker=None)
        return kind(changed(schema, _in_draft_7), registry=referencing.Registry())
    except jsonschema.SchemaError as error:
        place = ".".join(map(str, error.absolute_path)) or "<root>"
        raise ConfigurationError(f"is no valid JSON Schema: {place}: {error.message}") from None
    except RecursionError:
        raise ConfigurationError("is nested too deeply to be checked") from None


def problems_of(validator: Any, data: Any) -> str | None:
    """Return what is wrong with `data` as `path: message`, joined by `; `; None where it fits.

    At most three problems are told; behind them stands how many more there are. The path of
    the data itself is `<root>`.
    """
    token = _until.set(time.thread_time() + LONGEST_CHECK)
    try:
        errors = list(islice(validator.iter_errors(data), COUNTED + 1))
    except RecursionError:
        return "<root>: is nested too deeply to be checked against its schema"
    except _TooMuchWork:
        return "<root>: takes too long to be checked against its schema; give less data"
    finally:
        _until.reset(token)
    if not errors:
        return None
    errors.sort(key=lambda one: [str(part) for part in one.absolute_path])
    told = "; ".join(_told(error) for error in errors[:SHOWN])
    more = len(errors) - SHOWN
    if more <= 0:
        return told
    least = "at least " if len(errors) > COUNTED else ""
    return f"{told}; and {least}{more} more (truncated)"


def _told(error: Any) -> str:
    path = ".".join(str(part) for part in error.absolute_path) or "<root>"
    if error.validator not in ("anyOf", "oneOf") or not error.context:
        return f"{path}: {_short(error.message)}"
    forms = dict.fromkeys(_form(error, one) for one in islice(error.context, COUNTED))
    return f"{path}: fits none of the allowed forms ({', '.join(islice(forms, SHOWN))})"


def _form(error: Any, reason: Any) -> str:
    inner = ".".join(str(part) for part in list(reason.absolute_path)[len(error.absolute_path) :])
    return f"{inner}: {_short(reason.message)}" if inner else _short(reason.message)


def _short(message: str) -> str:
    # A message begins with the data and ends with the rule: the middle can go.
    half = _LONGEST_MESSAGE // 2
    return (
        message if len(message) <= _LONGEST_MESSAGE else f"{message[:half]} ... {message[-half:]}"
    )


def _in_draft_7(schema: Schema) -> Schema:
    """Write tuples as Draft 7 has them; pydantic writes a later draft's."""
    if "prefixItems" not in schema:
        return schema
    rest = {key: one for key, one in schema.items() if key not in ("prefixItems", "items")}
    written = {**rest, "items": schema["prefixItems"]}
    return {**written, "additionalItems": schema["items"]} if "items" in schema else written


@lru_cache(maxsize=1)
def _bounded_draft_7() -> Any:
    import jsonschema  # noqa: PLC0415 - as above

    keywords: dict[str, Any] = {
        **jsonschema.Draft7Validator.VALIDATORS,
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
        "uniqueItems": _unique_items,
    }
    watched = {name: _watched(keyword) for name, keyword in keywords.items()}
    extend: Any = jsonschema.validators.extend
    return extend(jsonschema.Draft7Validator, watched)


def _watched(keyword: Callable[..., Any]) -> Callable[..., Any]:
    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        if time.thread_time() > _until.get(float("inf")):
            raise _TooMuchWork
        return keyword(validator, value, instance, schema)

    return check


def _pattern(validator: Any, pattern: Any, instance: Any, _: Any) -> Iterator[Any]:
    import jsonschema  # noqa: PLC0415 - as above

    if validator.is_type(instance, "string") and not matches(pattern, instance):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: Any, instance: Any, _: Any) -> Iterator[Any]:
    if not validator.is_type(instance, "object"):
        return
    for pattern, schema in patterns.items():
        for name, value in instance.items():
            if matches(pattern, name):
                yield from validator.descend(value, schema, path=name, schema_path=pattern)


def _additional_properties(
    validator: Any, allowed: Any, instance: Any, schema: Any
) -> Iterator[Any]:
    import jsonschema  # noqa: PLC0415 - as above

    if not validator.is_type(instance, "object"):
        return
    patterns = schema.get("patternProperties", {})
    extra = [
        name
        for name in instance
        if name not in schema.get("properties", {})
        and not any(matches(pattern, name) for pattern in patterns)
    ]
    if validator.is_type(allowed, "object"):
        for name in extra:
            yield from validator.descend(instance[name], allowed, path=name)
    elif allowed is False and extra:
        names = ", ".join(repr(name) for name in extra[:SHOWN])
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
