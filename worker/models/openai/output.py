"""Asks a chat completion for JSON: any object, or one of a schema. Pure."""

import re
from typing import Any

from stepfleet.orchestrator.records.responses import OutputFormat

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_-]")
_NAME_LENGTH = 64


def response_format(output: OutputFormat) -> dict[str, Any]:
    """Return the body's `response_format`.

    Strict mode, in which the service guarantees the schema, is asked for where the schema is
    of the kind that it takes: it refuses a request with any other.
    """
    if output.json_schema is None:
        return {"type": "json_object"}
    name = _NOT_IN_A_NAME.sub("_", output.name)[:_NAME_LENGTH] or "response"
    return {
        "type": "json_schema",
        "json_schema": {
            "name": name,
            "schema": output.json_schema,
            "strict": fits_strict_mode(output.json_schema),
        },
    }


# What strict mode's documentation names; a schema with any other keyword is sent without it.
_STRICT_KEYWORDS = frozenset(
    {
        "type",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "anyOf",
        "enum",
        "const",
        "$ref",
        "$defs",
        "definitions",
        "title",
        "description",
    }
)


def fits_strict_mode(schema: Any, *, root: bool = True) -> bool:
    """Return whether strict mode takes `schema`: closed objects that require every property."""
    if not isinstance(schema, dict) or not schema.keys() <= _STRICT_KEYWORDS:
        return False
    if root and schema.get("type") != "object":
        return False
    properties = schema.get("properties", {})
    if schema.get("type") == "object" and (
        schema.get("additionalProperties") is not False
        or set(schema.get("required", ())) != set(properties)
    ):
        return False
    parts = [
        *properties.values(),
        *schema.get("anyOf", ()),
        *schema.get("$defs", {}).values(),
        *schema.get("definitions", {}).values(),
        *([schema["items"]] if "items" in schema else []),
    ]
    return all(fits_strict_mode(part, root=False) for part in parts)
