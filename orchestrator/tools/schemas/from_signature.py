"""Derives a tool's parameters from its signature: the JSON Schema and the check of arguments.

Knows nothing of calls, runs or models.

Arguments are checked in pydantic's strict JSON mode: it accepts the values that the published
schema allows, in the forms that JSON has for them (dates as text, lists for tuples and sets, 3.0
for 3), and nothing else. Lax mode would turn "no" into False and "12" into 12 silently; a model
that reads an error corrects itself.
"""

import inspect
import json
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import SchemaError

from stepfleet.orchestrator.errors import ConfigurationError, ToolArgumentsError
from stepfleet.orchestrator.records.text.validation import explain_invalid
from stepfleet.orchestrator.tools.schemas.handles import Untitled, unusable

_READ_OUT = 500
"""Problems that are read out; of more, those at the beginning of each list and object."""
_ITEMS, _NAMES = 20, 200
"""Items of each list, and names of each object, that make its beginning."""
_EXACT_FLOAT = 2.0**53
_STRICT = json.JSONEncoder(allow_nan=False)
_REFUSED_KINDS: Mapping[inspect._ParameterKind, str] = {
    inspect.Parameter.VAR_POSITIONAL: "collects any number of values (*); use a list parameter",
    inspect.Parameter.VAR_KEYWORD: "collects any keyword (**); name each parameter, or use a dict",
    inspect.Parameter.POSITIONAL_ONLY: "is positional-only; remove the / from the signature",
}


class _Offered(Untitled):
    """Offers a `Decimal` as text alone: a number loses the digits that a float cannot hold.

    The check takes numbers all the same.
    """

    def decimal_schema(self, schema: Any) -> dict[str, Any]:
        """Return the schema of the text."""
        found = super().decimal_schema(schema)
        texts = [one for one in found.get("anyOf", ()) if one.get("type") == "string"]
        return texts[0] if texts else found


@dataclass(frozen=True)
class Parameters:
    """The parameters of one function: their JSON Schema, and the check against it."""

    tool: str
    description: str
    schema: Mapping[str, Any]
    model: type[BaseModel]
    names: Mapping[str, str]
    """The model's field names and the parameters that they stand for."""
    optional: frozenset[str]
    """Fields whose default is the function's own."""

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments for the function, converted to its types.

        Raises `ToolArgumentsError` that names each wrong field (at most three).
        """
        try:
            text = _STRICT.encode(_one_number_type(arguments))
            checked = self.model.model_validate_json(text, strict=True)
        except ValidationError as error:
            raise ToolArgumentsError(
                f"tool {self.tool!r}: {self._problems(error, arguments)}"
            ) from None
        except (TypeError, ValueError, RecursionError) as error:
            raise ToolArgumentsError(
                f"tool {self.tool!r}: the arguments are not JSON data: {error}"
            ) from None
        given, values = checked.model_fields_set, vars(checked)
        return {
            parameter: values[field]
            for field, parameter in self.names.items()
            if field in given or field not in self.optional
        }

    def _problems(self, error: ValidationError, arguments: Mapping[str, Any]) -> str:
        """Return the problems: of very many the first ones.

        Each costs some microseconds and a kilobyte to be read out, and pydantic reads out all.
        """
        count = error.error_count()
        if count <= _READ_OUT:
            return explain_invalid(error)
        try:
            text = _STRICT.encode(_one_number_type(_beginning(arguments)))
            self.model.model_validate_json(text, strict=True)
        except ValidationError as some:
            return explain_invalid(some, count=count)
        return f"{count} of the values in it are wrong; give fewer at once"


def parameters_of(function: Callable[..., Any], tool: str) -> Parameters:
    """Return the parameters of `function`, described by its type hints and docstring.

    Raises `ConfigurationError` that names tool, parameter and fix.
    """
    source = unbound(function)
    doc = docstring_parser.parse(inspect.getdoc(source) or "")
    described = {one.arg_name: one.description for one in doc.params}
    hints = _hints(source, tool)
    bound = getattr(function, "keywords", {}) if isinstance(function, partial) else {}
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    optional = set()
    for place, parameter in enumerate(inspect.signature(function).parameters.values()):
        if parameter.name in bound:  # its value is settled, and may be a secret
            continue
        if refusal := _REFUSED_KINDS.get(parameter.kind):
            raise ConfigurationError(f"tool {tool!r}: parameter {parameter.name!r} {refusal}")
        if parameter.name not in hints:
            raise ConfigurationError(_no_hint(parameter.name, tool))
        # Neutral field names, since pydantic reserves some that parameters may well have.
        field = f"p{place}"
        names[field] = parameter.name
        fields[field] = _field(hints[parameter.name], parameter, described.get(parameter.name))
        if parameter.default is not parameter.empty and not isinstance(
            parameter.default, FieldInfo
        ):
            optional.add(field)
    model = _model(fields, names, tool)
    return Parameters(
        tool=tool,
        description=(doc.description or "").strip(),
        schema=_schema(model, tool),
        model=model,
        names=names,
        optional=frozenset(optional),
    )


def unbound(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function behind those that bind arguments of it (`functools.partial`)."""
    while isinstance(function, partial):
        function = function.func
    return function


def _hints(function: Callable[..., Any], tool: str) -> dict[str, Any]:
    source = function if inspect.isroutine(function) else type(function).__call__
    try:
        return get_type_hints(source, localns=_names_around(source), include_extras=True)
    except (NameError, TypeError, AttributeError, SyntaxError) as error:
        raise ConfigurationError(
            f"tool {tool!r}: its type hints cannot be read: {error}; define or import the types "
            "that it names at the top of its module, or before it in the function that holds both"
        ) from None


def _names_around(function: Any) -> dict[str, Any]:
    """Return what the functions that are defining `function` at the moment have defined before it.

    Hints may name local classes: `from __future__ import annotations` makes text of all hints.
    """
    places = getattr(function, "__qualname__", "").split(".<locals>.")[:-1]
    around = {".<locals>.".join(places[: end + 1]) for end in range(len(places))}
    names: dict[str, Any] = {}
    frame = inspect.currentframe() if around else None
    while frame is not None:
        if frame.f_globals is function.__globals__ and frame.f_code.co_qualname in around:
            names = {**frame.f_locals, **names}
        frame = frame.f_back
    return names


def _no_hint(name: str, tool: str) -> str:
    if name in ("self", "cls"):
        return (
            f"tool {tool!r}: it is a method; make a tool of the bound method, tool(object.{tool}), "
            "or write a class with name, description, schema and execute"
        )
    return f"tool {tool!r}: parameter {name!r} has no type hint; write {name}: str, for example"


def _field(hint: Any, parameter: inspect.Parameter, description: str | None) -> Any:
    hint = _of_json(hint)
    info = FieldInfo.from_annotation(hint)
    default = parameter.default
    if default is parameter.empty:
        default = ... if info.is_required() else _default_of(info)
    elif default is None:
        hint = _nullable(hint)
    named: Any = Annotated[hint, Field(alias=parameter.name)]
    has_own = info.description or (isinstance(default, FieldInfo) and default.description)
    if description and not has_own:
        named = Annotated[named, Field(description=" ".join(description.split()))]
    return (named, default)


def _default_of(info: FieldInfo) -> Any:
    """Return the default that stands in a hint: `Annotated[int, Field(default=3)]`."""
    if info.default_factory is not None:
        return Field(default_factory=info.default_factory)
    return Field(default=info.default)


def _of_json(hint: Any) -> Any:
    """Write any iterable as a list: pydantic checks its items only while they are taken."""
    if get_origin(hint) is Annotated:
        inner, *metadata = get_args(hint)
        return Annotated[(_of_json(inner), *metadata)]
    if get_origin(hint) in (Union, UnionType):
        return Union[tuple(map(_of_json, get_args(hint)))]  # noqa: UP007 - of a computed tuple
    if hint in (Iterable, typing.Iterable) or get_origin(hint) is Iterable:
        return list[get_args(hint) or Any]  # type: ignore[misc]
    return hint


def _nullable(hint: Any) -> Any:
    """Let null through, as the default None does: `x: int = None`."""
    inner, *metadata = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    allowed: Any = Union[inner, None]  # noqa: UP007 - `|` is not for every hint
    return Annotated[(allowed, *metadata)] if metadata else allowed


def _model(fields: dict[str, Any], names: Mapping[str, str], tool: str) -> type[BaseModel]:
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=False)
    try:
        model: type[BaseModel] = create_model(tool, __config__=config, **fields)
    except (PydanticUserError, SchemaError, TypeError) as error:
        broken = (one for field, one in names.items() if not _is_usable(fields[field], config))
        raise ConfigurationError(
            f"tool {tool!r}: parameter {next(broken, '?')!r} {unusable(error)}"
        ) from None
    for place, parameter in names.items():
        if why := why_never(model.__pydantic_core_schema__, place):
            raise ConfigurationError(
                f"tool {tool!r}: no model could give parameter {parameter!r}: {why}"
            )
    return model


def _is_usable(field: Any, config: ConfigDict) -> bool:
    try:
        create_model("probe", __config__=config, only=field)
    except (PydanticUserError, SchemaError, TypeError):
        return False
    return True


def _schema(model: type[BaseModel], tool: str) -> dict[str, Any]:
    try:
        schema = model.model_json_schema(by_alias=True, schema_generator=_Offered)
    except PydanticUserError as error:
        reason = str(error).splitlines()[0]
        raise ConfigurationError(
            f"tool {tool!r}: a parameter has a type without JSON Schema: {reason}"
        ) from None
    schema.pop("title", None)
    try:
        _STRICT.encode(schema)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"tool {tool!r}: the JSON Schema of its parameters is not JSON: {error}"
        ) from None
    return schema


def _one_number_type(value: Any) -> Any:
    """Write whole floats as integers: JSON has one number type, and 3.0 is an integer there."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT_FLOAT:
        return int(value)
    if isinstance(value, Mapping):
        return {key: _one_number_type(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_one_number_type(one) for one in value]
    return value


def _beginning(value: Any) -> Any:
    """Return data with the first items of each list and object."""
    if isinstance(value, Mapping):
        return {key: _beginning(value[key]) for key in islice(value, _NAMES)}
    if isinstance(value, list | tuple):
        return [_beginning(one) for one in value[:_ITEMS]]
    return value


_TEXT = "the keys of an object are text in JSON; use str, int, a date or an enum"
_NO_KEYS = {
    *("tuple", "list", "set", "frozenset", "dict", "generator", "none"),
    *("model", "dataclass", "typed-dict", "named-tuple"),
}
_BY_CODE = {"function-before", "function-wrap", "function-plain", "chain"}
"""Code of the user's sees the value first, and may make anything of it."""
_INSIDE = ("schema", "items_schema", "keys_schema", "values_schema")
_REASONS = {
    "is-subclass": "a class cannot come from JSON; use str, and look the class up",
    "is-instance": "instances of it cannot come from JSON; use a type with fields or values",
    "callable": "a function cannot come from JSON; use str, and look the function up",
    "generator": "its items would be checked while the tool runs; use list[...]",
}
Core = Mapping[str, Any]

_ANY: Core = {"type": "any"}


def why_never(core: Core, field: str) -> str | None:
    """Return why nothing in JSON is a value of a model's field; None where something may be.

    `core` is the model's core schema. A type may have a JSON Schema and accept nothing that JSON
    can hold: a tool with one could never be called.
    """
    kinds = {one["ref"]: one for one in core.get("definitions", ())}
    while "fields" not in core:
        core = kinds[core["schema_ref"]] if core["type"] == "definition-ref" else core["schema"]
    return _why(core["fields"][field]["schema"], kinds, frozenset())


def _why(core: Core, kinds: Mapping[str, Core], above: frozenset[str]) -> str | None:
    kind = core["type"]
    if kind in _BY_CODE:
        return None
    if kind == "definition-ref":
        name = core["schema_ref"]
        return None if name in above else _why(kinds.get(name, _ANY), kinds, above | {name})
    if kind == "union":
        choices = [_why(_choice(one), kinds, above) for one in core["choices"]]
        return choices[0] if choices and all(choices) else None
    if kind == "literal" and not [one for one in core["expected"] if not isinstance(one, bytes)]:
        return "JSON has no bytes; use text"
    if kind == "dict" and (why := _why_no_key(core.get("keys_schema", _ANY), kinds)):
        return why
    own = _REASONS.get(kind)
    return own or next(filter(None, (_why(one, kinds, above) for one in _inner(core))), None)


def _why_no_key(core: Core, kinds: Mapping[str, Core]) -> str | None:
    kind = core["type"]
    if kind == "definition-ref":
        return _why_no_key(kinds.get(core["schema_ref"], _ANY), kinds)
    if kind == "union":
        choices = [_why_no_key(_choice(one), kinds) for one in core["choices"]]
        return choices[0] if choices and all(choices) else None
    if kind == "literal":
        return None if any(isinstance(one, str) for one in core["expected"]) else _TEXT
    if kind in _NO_KEYS:
        return _TEXT
    return next(filter(None, (_why_no_key(one, kinds) for one in _json_form(core))), None)


def _choice(choice: Any) -> Core:
    found: Core = choice[0] if isinstance(choice, tuple) else choice
    return found


def _json_form(core: Core) -> Iterator[Core]:
    """Yield the schema that a wrapper applies to JSON."""
    if core["type"] in _BY_CODE:
        return
    for name in ("json_schema", "strict_schema", "schema"):
        if isinstance(inner := core.get(name), Mapping) and "type" in inner:
            yield inner
            return


def _inner(core: Core) -> Iterator[Core]:
    """Yield the schemas of the parts that every value has."""
    if core["type"] in ("json-or-python", "lax-or-strict"):
        yield from _json_form(core)
        return
    for name in _INSIDE:
        one = core.get(name)
        if isinstance(one, Mapping) and "type" in one:
            yield one
        elif isinstance(one, list):
            yield from one
    fields = core.get("fields")
    parts = fields.values() if isinstance(fields, Mapping) else fields or ()
    for part in parts:  # a dataclass has their names next to them
        if isinstance(part, Mapping) and part.get("required", part["schema"]["type"] != "default"):
            yield part["schema"]
