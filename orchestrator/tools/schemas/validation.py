"""Checks data against a JSON Schema of Draft 7, within bounds, and says what is wrong with it.

Patterns match in linear time, and a check that takes too long is given up: no schema and no
data makes it endless. Nothing is fetched.
"""

from itertools import islice
from typing import Any

from stepfleet.orchestrator.tools.schemas import validators
from stepfleet.orchestrator.tools.schemas.subschemas import Schema, changed
from stepfleet.orchestrator.tools.schemas.time_limit import TooMuchWorkError

SHOWN = 3
"""Problems that are told in words; the others are counted."""
COUNTED = 100

_LONGEST_MESSAGE = 200


def validator_of(schema: Schema) -> Any:
    """Return what `problems_of` needs. Raises `ConfigurationError` for what is no JSON Schema."""
    # Imported on first use: it takes longer than all of this package.
    import jsonschema  # noqa: PLC0415

    return validators.validator_of(
        validators.bounded(jsonschema.Draft7Validator), changed(schema, _in_draft_7)
    )


def problems_of(validator: Any, data: Any) -> str | None:
    """Return what is wrong with `data` as `path: message`, joined by `; `; None where it fits.

    At most three problems are told; behind them stands how many more there are. The path of
    the data itself is `<root>`.
    """
    try:
        errors = validators.errors_of(validator, data, COUNTED + 1)
    except RecursionError:
        return "<root>: is nested too deeply to be checked against its schema"
    except TooMuchWorkError:
        return "<root>: takes too long to be checked against its schema; give less data"
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
