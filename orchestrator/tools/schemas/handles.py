"""The schema of an answer's data: made of a type or a dict, found again by its name anywhere.

A configuration stores the schema, so that any worker checks data without the type.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, get_origin

import orjson
from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind
from pydantic_core import PydanticSerializationError, SchemaError

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.tools.schemas.bounded_json import BoundsError, plain_json
from stepfleet.orchestrator.tools.schemas.checks import problems_of
from stepfleet.orchestrator.tools.schemas.patterns import compiled, patterns_of

Schema = dict[str, Any]

_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependencies")
_LISTED = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_SINGLE = (
    "items",
    "additionalItems",
    "additionalProperties",
    "propertyNames",
    "contains",
    "not",
    "if",
    "then",
    "else",
)

LARGEST = 64 * 1024
"""Bytes that a schema may have as JSON."""
UNNAMED = "structured"
_REMEMBERED = 256
_COMBINED = ("anyOf", "oneOf", "allOf")
VALUE = "value"
_VALUE_OF = "__value"
_UNFIT = re.compile(r"[^A-Za-z0-9_-]+")


class Untitled(GenerateJsonSchema):
    """Leaves out what tells a model nothing.

    These are the titles that pydantic makes of field names, and defaults that JSON does not have.
    """

    ignored_warning_kinds: set[JsonSchemaWarningKind] = {  # noqa: RUF012 - the base's form
        "skipped-choice",
        "non-serializable-default",
    }

    def encode_default(self, dft: Any) -> Any:
        """Return a default as JSON; pydantic leaves out one for which this raises."""
        try:
            encoded = super().encode_default(dft)
            json.dumps(encoded, allow_nan=False)
        except (TypeError, ValueError, AttributeError) as error:
            raise PydanticSerializationError(str(error)) from None
        return encoded

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002 - the base's signature
        """Return False."""
        return False


def unusable(error: Exception) -> str:
    """Return the message for a type that pydantic cannot use; it follows the type's name."""
    if isinstance(error, SchemaError):  # of patterns: the reason is on the last line
        reason = str(error).splitlines()[-1].strip().removeprefix("error: ")
        return (
            f"cannot be checked: {reason}; write a pattern without look-around and"
            " back-references, or check the value in your code"
        )
    reason = str(error).splitlines()[0].partition(". Set `arbitrary")[0]
    return (
        f"has a type that JSON cannot express: {reason}; use plain types, pydantic models, "
        "dataclasses, TypedDicts or enums"
    )


@dataclass(frozen=True, eq=False)
class SchemaHandle:
    """A schema of an object, by its name; `schema["title"]` is that name.

    For a type whose data is not an object, such as `int` or `list[Row]`, it describes an object
    that holds the data as its `value`: providers and tools take objects only.
    """

    name: str
    schema: Schema = field(repr=False)

    @property
    def holds_value(self) -> bool:
        """Whether answers are what the object holds, and not the object."""
        return self.name.endswith(_VALUE_OF) and list(self.schema.get("properties", ())) == [VALUE]

    @property
    def type_name(self) -> str:
        """The name of the type that answers have."""
        return self.name.removesuffix(_VALUE_OF) if self.holds_value else self.name

    def answer(self, data: Any) -> Any:
        """Return the answer in data that fits the schema."""
        return data[VALUE] if self.holds_value else data

    @cached_property
    def _validator(self) -> Any:
        from stepfleet.orchestrator.tools.schemas.validators import (  # noqa: PLC0415
            DRAFT_7,
            validator_of,
        )

        return validator_of(changed(self.schema, _in_draft_7), default=DRAFT_7)

    def problems(self, data: Any) -> str | None:
        """Return the problems of JSON data, or None. See `checks.problems_of`."""
        return problems_of(self._validator, data)


_handles: dict[bytes, SchemaHandle] = {}


def schema_of(output_type: Any) -> SchemaHandle:
    """Return the schema of a type that pydantic knows, or of a JSON Schema given as a dict.

    One type has one handle. Raises `ConfigurationError` that names the fix where the data of a
    dict's schema would not be an object, or the schema cannot be used.
    """
    if isinstance(output_type, Mapping):
        return handle_of(output_type)
    try:
        return _of_type(output_type)
    except TypeError:  # not hashable: a type made on the spot
        return _of_type.__wrapped__(output_type)


def handle_of(schema: Any) -> SchemaHandle:
    """Return the handle of a JSON Schema; equal schemas have the same. Raises as `schema_of`."""
    key = _key(schema)
    known = _handles.get(key) if key else None
    if known is not None:
        return known
    try:
        handle = _made(plain_json(schema, limit=LARGEST))
    except BoundsError as error:
        raise ConfigurationError(_wrong(str(error))) from None
    if key:
        if len(_handles) >= _REMEMBERED:
            _handles.pop(next(iter(_handles)), None)
        _handles[key] = handle
    return handle


def _key(schema: Any) -> bytes | None:
    """Return the text that equal schemas share; None for other data than JSON."""
    try:
        return exact_json.dumps(schema, option=orjson.OPT_SORT_KEYS)
    except (TypeError, ValueError):
        return None


@lru_cache(maxsize=_REMEMBERED)
def _of_type(output_type: Any) -> SchemaHandle:
    try:
        schema = TypeAdapter(output_type).json_schema(schema_generator=Untitled)
    except (PydanticUserError, SchemaError, TypeError) as error:
        raise ConfigurationError(f"{output_type!r} {unusable(error)}") from None
    if not _may_be_object(schema):
        return handle_of(_of_value(schema, output_type))
    name = getattr(output_type, "__name__", None) if get_origin(output_type) is None else None
    return handle_of({**schema, "title": name} if name else schema)


def _may_be_object(schema: Schema) -> bool:
    schema = _with_root(schema)
    choices = [one for keyword in _COMBINED for one in schema.get(keyword, ())]
    if not choices:
        return schema.get("type") == "object"
    shared = {key: one for key, one in schema.items() if key in ("$defs", "definitions")}
    return any(_may_be_object({**one, **shared}) for one in choices)


def _of_value(schema: Schema, output_type: Any) -> Schema:
    """Return the schema of an object that holds such data."""
    shared = {key: one for key, one in schema.items() if key in ("$defs", "definitions")}
    inner = {key: one for key, one in schema.items() if key not in shared}
    if {"type": "null"} in (inner, *(inner.get("anyOf") or ())):
        raise ConfigurationError(
            f"{output_type!r} allows null, which no answer could be told from; use a model with"
            " an optional field"
        )
    name = getattr(get_origin(output_type) or output_type, "__name__", UNNAMED)
    return {
        "type": "object",
        "properties": {VALUE: inner},
        "required": [VALUE],
        "additionalProperties": False,
        "title": f"{_UNFIT.sub('_', name)}{_VALUE_OF}",
        **shared,
    }


def _made(schema: Any) -> SchemaHandle:
    """Return a new handle; refuses a schema that no answer could be checked against."""
    if not isinstance(schema, dict):
        raise ConfigurationError(_wrong("must be a JSON Schema, given as an object"))
    _check_references(schema)
    schema = _closed(_with_root(changed(schema, _without_dialect)))
    name = schema.get("title")
    name = name if isinstance(name, str) and name.strip() else UNNAMED
    handle = SchemaHandle(name, {**schema, "title": name})
    try:
        handle.problems({})  # builds the validator, which checks the schema itself
    except ConfigurationError as error:
        raise ConfigurationError(_wrong(error.message)) from None
    _check_patterns(schema)
    return handle


def _without_dialect(schema: Schema) -> Schema:
    """Leave out the keywords that choose another draft, or another base of references."""
    return {key: one for key, one in schema.items() if key not in ("$schema", "$id")}


def _with_root(schema: Schema) -> Schema:
    """Put the definition that the root refers to in the root's place."""
    seen: set[str] = set()
    while isinstance(reference := schema.get("$ref"), str) and reference not in seen:
        seen.add(reference)
        rest = {key: one for key, one in schema.items() if key != "$ref"}
        schema = {**_target(schema, reference), **rest}
    return schema


def _closed(schema: Schema) -> Schema:
    """Refuse data other than objects, and properties that the schema does not name."""
    combined = any(keyword in schema for keyword in _COMBINED)
    if schema.get("type") != "object" and not ("type" not in schema and combined):
        raise ConfigurationError(
            _wrong('must describe an object ("type": "object"); wrap other data in one field')
        )
    if combined or "additionalProperties" in schema or not schema.get("properties"):
        return schema
    return {**schema, "additionalProperties": False}


def _check_references(schema: Schema) -> None:
    """Refuse references to parts outside the walk over the schema, which nobody checks."""
    inside = list(each(schema))
    known = {id(one) for one in inside}
    for one in inside:
        reference = one.get("$ref")
        if reference is not None and id(_target(schema, reference)) not in known:
            raise ConfigurationError(_wrong(f"refers to {reference!r}; put that under $defs"))


def _check_patterns(schema: Schema) -> None:
    for pattern in (pattern for one in each(schema) for pattern in patterns_of(one)):
        try:
            compiled(pattern)
        except ConfigurationError as error:
            raise ConfigurationError(_wrong(f"has a {error.message}")) from None


def _target(schema: Schema, reference: Any) -> Schema:
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise ConfigurationError(
            _wrong(f"refers to {reference!r}; put that schema under $defs, nothing is fetched")
        )
    found: Any = schema
    for part in reference.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        found = _inside(found, name)
    if not isinstance(found, dict):
        raise ConfigurationError(_wrong(f"refers to {reference!r}, which it does not hold"))
    return found


def _inside(found: Any, name: str) -> Any:
    if isinstance(found, list):
        return found[int(name)] if name.isdecimal() and int(name) < len(found) else None
    return found.get(name) if isinstance(found, dict) else None


def _wrong(why: str) -> str:
    return f"the JSON Schema {why}"


def _in_draft_7(schema: Schema) -> Schema:
    """Write tuples as Draft 7 has them; pydantic writes a later draft's."""
    if "prefixItems" not in schema:
        return schema
    rest = {key: one for key, one in schema.items() if key not in ("prefixItems", "items")}
    written = {**rest, "items": schema["prefixItems"]}
    return {**written, "additionalItems": schema["items"]} if "items" in schema else written


def changed(schema: Any, change: Callable[[Schema], Schema]) -> Any:
    """Return a copy of `schema` in which each schema, the innermost first, went through `change`.

    The schemas `true` and `false`, and other values, stay as they are.
    """
    if not isinstance(schema, dict):
        return schema
    copied = dict(schema)
    for keyword in _NAMED:
        if isinstance(schema.get(keyword), dict):
            named = schema[keyword].items()
            copied[keyword] = {name: changed(one, change) for name, one in named}
    for keyword in _LISTED:
        if isinstance(schema.get(keyword), list):
            copied[keyword] = [changed(one, change) for one in schema[keyword]]
    for keyword in _SINGLE:
        if isinstance(schema.get(keyword), dict):
            copied[keyword] = changed(schema[keyword], change)
    return change(copied)


def each(schema: Any) -> Iterator[Schema]:
    """Yield `schema` and all schemas inside it, the very objects."""
    if not isinstance(schema, dict):
        return
    yield schema
    inner: list[Any] = [schema.get(keyword) for keyword in _SINGLE]
    for keyword in _NAMED:
        named = schema.get(keyword)
        inner += named.values() if isinstance(named, dict) else ()
    for keyword in _LISTED:
        listed = schema.get(keyword)
        inner += listed if isinstance(listed, list) else ()
    for one in inner:
        yield from each(one)


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
