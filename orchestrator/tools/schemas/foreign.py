"""Checks arguments against a JSON Schema that was written by hand or came from elsewhere.

For tools that bring their own schema instead of type hints. Nothing is fetched: a schema that
refers to another address is refused. No schema and no arguments make a check endless.
"""

from collections.abc import Callable, Mapping
from typing import Any

from stepfleet.orchestrator.errors import ConfigurationError, ToolArgumentsError
from stepfleet.orchestrator.tools.schemas.time_limit import SlowCheckError, TooMuchWorkError
from stepfleet.orchestrator.tools.schemas.validators import errors_of, validator_for, validator_of

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
    _check_object(tool, schema)
    lazily: list[Any] = []

    def check(arguments: Mapping[str, Any]) -> dict[str, Any]:
        if not lazily:
            lazily.append(_validator(tool, schema, lenient=checked_again))
        _check(tool, lazily[0], arguments)
        return dict(arguments)

    return check


def check_sound(tool: str, schema: Mapping[str, Any]) -> None:
    """Raise `ConfigurationError` where arguments could not be checked against `schema` in time.

    For schemas of servers, which check again themselves (see `checker_of`).
    """
    _check_object(tool, schema)
    _problems(tool, _validator(tool, schema, lenient=True), {}, of_schema=True)


def _check_object(tool: str, schema: Mapping[str, Any]) -> None:
    if schema.get("type", "object") != "object" or not isinstance(
        schema.get("properties", {}), Mapping
    ):
        raise ConfigurationError(
            f'tool {tool!r}: schema must be a JSON Schema of an object: {{"type": "object", '
            '"properties": {...}}'
        )


def _validator(tool: str, schema: Mapping[str, Any], *, lenient: bool) -> Any:
    # Imported on first use: it takes longer than all of this package, and clients never check.
    import jsonschema  # noqa: PLC0415

    try:
        kind = validator_for(schema, jsonschema.Draft202012Validator, lenient=lenient)
        return validator_of(kind, schema)
    except ConfigurationError as error:
        raise ConfigurationError(f"tool {tool!r}: schema {_short(error.message)}") from None


def _problems(
    tool: str, validator: Any, arguments: Mapping[str, Any], *, of_schema: bool = False
) -> list[Any]:
    """Return what is wrong with arguments. What takes too long is their fault or the schema's."""
    import referencing.exceptions  # noqa: PLC0415 - as above

    try:
        return errors_of(validator, dict(arguments), _COUNTED)
    except (TooMuchWorkError, RecursionError):
        if of_schema:
            raise ConfigurationError(
                f"tool {tool!r}: schema takes too long to be checked; make it smaller"
            ) from None
        raise ToolArgumentsError(
            f"tool {tool!r}: the arguments take too long to be checked; give less"
        ) from None
    except referencing.exceptions.Unresolvable as error:
        raise ConfigurationError(
            f"tool {tool!r}: schema refers to {error.ref!r}, which it does not hold"
        ) from None
    except (SlowCheckError, ConfigurationError):
        raise
    except Exception as error:  # noqa: BLE001 - whatever a schema makes of two libraries
        raise ConfigurationError(
            f"tool {tool!r}: schema cannot be used: {_short(repr(error))}"
        ) from None


def _check(tool: str, validator: Any, arguments: Mapping[str, Any]) -> None:
    problems = _problems(tool, validator, arguments)
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
