"""Checks arguments against a JSON Schema that was written by hand or came from elsewhere.

For tools that bring their own schema instead of type hints. Nothing is fetched: a schema that
refers to another address is refused. No schema and no arguments make a check endless.
"""

from collections.abc import Callable, Mapping
from typing import Any

from stepfleet.orchestrator.errors import ConfigurationError, ToolArgumentsError
from stepfleet.orchestrator.tools.bounded_schemas import TooMuchWorkError, bounded, errors_of

_SHOWN = 3
_COUNTED = 100
_LONGEST = 300


def checker_of(
    tool: str, schema: Mapping[str, Any], *, checked_again: bool = False
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return the function that checks arguments of `tool` against `schema`.

    A pattern with look-around or back-references, which some texts would keep busy for ever, is
    a `ConfigurationError` at the first call; it is left out where a server checks again itself.
    The function raises `ToolArgumentsError`, with the path of each problem (at most three).
    Raises `ConfigurationError` when the schema is not that of an object.
    """
    if schema.get("type", "object") != "object" or not isinstance(
        schema.get("properties", {}), Mapping
    ):
        raise ConfigurationError(
            f'tool {tool!r}: schema must be a JSON Schema of an object: {{"type": "object", '
            '"properties": {...}}'
        )
    lazily: list[Any] = []

    def check(arguments: Mapping[str, Any]) -> dict[str, Any]:
        if not lazily:
            lazily.append(_validator(tool, schema, lenient=checked_again))
        _check(tool, lazily[0], arguments)
        return dict(arguments)

    return check


def _validator(tool: str, schema: Mapping[str, Any], *, lenient: bool) -> Any:
    # Imported on first use: it takes longer than all of this package, and clients never check.
    import jsonschema  # noqa: PLC0415
    import referencing  # noqa: PLC0415

    known: Any = jsonschema.validators.validator_for(
        schema, default=jsonschema.Draft202012Validator
    )
    kind = bounded(known, lenient=lenient)
    try:
        # No format checker: it would compile patterns with Python's engine.
        kind.check_schema(schema, format_checker=None)
    except jsonschema.SchemaError as error:
        raise ConfigurationError(
            f"tool {tool!r}: schema is no valid JSON Schema: {_short(error.message)}"
        ) from None
    except RecursionError:
        raise ConfigurationError(f"tool {tool!r}: schema is nested too deeply") from None
    return kind(schema, registry=referencing.Registry())


def _check(tool: str, validator: Any, arguments: Mapping[str, Any]) -> None:
    import referencing.exceptions  # noqa: PLC0415 - as above

    try:
        problems = errors_of(validator, dict(arguments), _COUNTED)
    except (TooMuchWorkError, RecursionError):
        raise ToolArgumentsError(
            f"tool {tool!r}: the arguments take too long to be checked; give less"
        ) from None
    except referencing.exceptions.Unresolvable as error:
        raise ConfigurationError(
            f"tool {tool!r}: schema refers to {error.ref!r}, which it does not hold"
        ) from None
    if problems:
        problems.sort(key=lambda one: list(map(str, one.path)))
        said = [f"{_place(one)}: {_short(one.message)}" for one in problems[:_SHOWN]]
        more = len(problems) - _SHOWN
        raise ToolArgumentsError(
            f"tool {tool!r}: " + "; ".join(said) + (f"; and {more} more" if more > 0 else "")
        )


def _place(error: Any) -> str:
    return ".".join(str(part) for part in error.absolute_path) or "<root>"


def _short(message: str) -> str:
    # A message begins with the data and ends with the rule: the middle can go.
    half = _LONGEST // 2
    return message if len(message) <= _LONGEST else f"{message[:half]} ... {message[-half:]}"
