"""Checks data against a JSON Schema that somebody else wrote, and describes the problems.

Arguments of tools that bring their own schema instead of type hints, and the data of answers.
Nothing is fetched: a schema that refers to another address is refused. No schema and no data make
a check endless.
"""

from collections.abc import Callable, Mapping
from functools import cache
from itertools import islice
from typing import Any

from stepfleet.orchestrator.errors import ConfigurationError, ToolArgumentsError
from stepfleet.orchestrator.tools.schemas.time_limit import TooMuchWorkError

_SHOWN = 3
"""Problems that a message describes; the others are counted."""
_COUNTED = 100
_LONGEST = 240


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
    validator = cache(lambda: _validator(tool, schema, lenient=checked_again))

    def check(arguments: Mapping[str, Any]) -> dict[str, Any]:
        if errors := _errors(tool, validator(), arguments):
            raise ToolArgumentsError(f"tool {tool!r}: {_described(errors)}")
        return dict(arguments)

    return check


def check_sound(tool: str, schema: Mapping[str, Any]) -> None:
    """Raise `ConfigurationError` where arguments could not be checked against `schema` in time.

    For schemas of servers, which check again themselves (see `checker_of`).
    """
    _check_object(tool, schema)
    _errors(tool, _validator(tool, schema, lenient=True), {}, of_schema=True)


def _check_object(tool: str, schema: Mapping[str, Any]) -> None:
    if schema.get("type", "object") != "object" or not isinstance(
        schema.get("properties", {}), Mapping
    ):
        raise ConfigurationError(
            f'tool {tool!r}: schema must be a JSON Schema of an object: {{"type": "object", '
            '"properties": {...}}'
        )


def _validator(tool: str, schema: Mapping[str, Any], *, lenient: bool) -> Any:
    from stepfleet.orchestrator.tools.schemas.validators import validator_of  # noqa: PLC0415

    try:
        return validator_of(schema, lenient=lenient)
    except ConfigurationError as error:
        raise ConfigurationError(f"tool {tool!r}: schema {_short(error.message)}") from None


def _errors(
    tool: str, validator: Any, arguments: Mapping[str, Any], *, of_schema: bool = False
) -> list[Any]:
    """Return the problems of arguments. Raises for a check that takes too long."""
    from stepfleet.orchestrator.tools.schemas.validators import errors_of  # noqa: PLC0415

    try:
        return errors_of(validator, dict(arguments), _COUNTED + 1)
    except (TooMuchWorkError, RecursionError):
        if of_schema:
            raise ConfigurationError(
                f"tool {tool!r}: schema takes too long to be checked; make it smaller"
            ) from None
        raise ToolArgumentsError(
            f"tool {tool!r}: the arguments take too long to be checked; give less"
        ) from None
    except ConfigurationError as error:
        raise ConfigurationError(f"tool {tool!r}: schema {_short(error.message)}") from None


def problems_of(validator: Any, data: Any) -> str | None:
    """Return the problems of `data` as `path: message`, joined by `; `; None where it fits.

    At most three problems are described, and the number of the others is given. The path of the
    data itself is `<root>`.
    """
    from stepfleet.orchestrator.tools.schemas.validators import errors_of  # noqa: PLC0415

    try:
        errors = errors_of(validator, data, _COUNTED + 1)
    except RecursionError:
        return "<root>: is nested too deeply to be checked against its schema"
    except TooMuchWorkError:
        return "<root>: takes too long to be checked against its schema; give less data"
    return _described(errors) if errors else None


def _described(errors: list[Any]) -> str:
    errors.sort(key=lambda one: [str(part) for part in one.absolute_path])
    text = "; ".join(_problem(error) for error in errors[:_SHOWN])
    more = len(errors) - _SHOWN
    if more <= 0:
        return text
    least = "at least " if len(errors) > _COUNTED else ""
    return f"{text}; and {least}{more} more (truncated)"


def _problem(error: Any) -> str:
    path = ".".join(str(part) for part in error.absolute_path) or "<root>"
    if error.validator not in ("anyOf", "oneOf") or not error.context:
        return f"{path}: {_short(error.message)}"
    forms = dict.fromkeys(_form(error, one) for one in islice(error.context, _COUNTED))
    return f"{path}: fits none of the allowed forms ({', '.join(islice(forms, _SHOWN))})"


def _form(error: Any, reason: Any) -> str:
    inner = ".".join(str(part) for part in list(reason.absolute_path)[len(error.absolute_path) :])
    return f"{inner}: {_short(reason.message)}" if inner else _short(reason.message)


def _short(message: str) -> str:
    # A message begins with the data and ends with the rule: the middle can go.
    half = _LONGEST // 2
    return message if len(message) <= _LONGEST else f"{message[:half]} ... {message[-half:]}"
