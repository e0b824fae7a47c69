"""Checks arguments against a JSON Schema that was written by hand or came from elsewhere.

For tools that bring their own schema instead of type hints. Nothing is fetched: a schema that
refers to another address is refused.
"""

from collections.abc import Callable, Mapping
from typing import Any

from stepfleet.orchestrator.errors import ConfigurationError, ToolArgumentsError

_SHOWN = 3


def checker_of(
    tool: str, schema: Mapping[str, Any]
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return the function that checks arguments of `tool` against `schema`.

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
            lazily.append(_validator(tool, schema))
        _check(tool, lazily[0], arguments)
        return dict(arguments)

    return check


def _validator(tool: str, schema: Mapping[str, Any]) -> Any:
    # Imported on first use: it takes longer than all of this package, and clients never check.
    import jsonschema  # noqa: PLC0415
    import referencing  # noqa: PLC0415

    known: Any = jsonschema.validators.validator_for(
        schema, default=jsonschema.Draft202012Validator
    )
    try:
        known.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ConfigurationError(
            f"tool {tool!r}: schema is no valid JSON Schema: {error.message}"
        ) from None
    return known(schema, registry=referencing.Registry())


def _check(tool: str, validator: Any, arguments: Mapping[str, Any]) -> None:
    import referencing.exceptions  # noqa: PLC0415 - as above

    try:
        problems = sorted(
            validator.iter_errors(dict(arguments)), key=lambda one: list(map(str, one.path))
        )
    except referencing.exceptions.Unresolvable as error:
        raise ConfigurationError(
            f"tool {tool!r}: schema refers to {error.ref!r}, which it does not hold"
        ) from None
    if problems:
        said = [
            f"{'.'.join(str(part) for part in one.absolute_path) or '<root>'}: {one.message}"
            for one in problems[:_SHOWN]
        ]
        more = len(problems) - _SHOWN
        raise ToolArgumentsError(
            f"tool {tool!r}: " + "; ".join(said) + (f"; and {more} more" if more > 0 else "")
        )
