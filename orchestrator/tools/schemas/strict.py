"""Which schemas strict modes take: there the service itself holds a call to its schema. Pure."""

from typing import Any

# What strict mode's documentation names; a schema with any other keyword is sent without it.
_STRICT_KEYWORDS = frozenset(
    ("type", "properties", "required", "additionalProperties", "items", "anyOf", "enum", "const",
     "$ref", "$defs", "definitions", "title", "description")
)  # fmt: skip


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
