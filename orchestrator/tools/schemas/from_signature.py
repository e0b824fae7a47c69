"""Derives a tool's parameters from its signature: the JSON Schema and the check of arguments.

Knows nothing of calls, runs or models.

Arguments are checked in pydantic's strict JSON mode: it accepts the values that the published
schema allows, in the forms that JSON has for them (dates as text, lists for tuples and sets, 3.0
for 3), and nothing else. Lax mode would turn "no" into False and "12" into 12 silently; a model
that reads an error corrects itself.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, get_type_hints

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo

from stepfleet.orchestrator.errors import ConfigurationError, ToolArgumentsError
from stepfleet.orchestrator.records.text.validation import explain_invalid
from stepfleet.orchestrator.tools.schemas.handles import Untitled

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
                f"tool {self.tool!r}: the arguments are no JSON data: {error}"
            ) from None
        return {
            parameter: getattr(checked, field)
            for field, parameter in self.names.items()
            if field in checked.model_fields_set or field not in self.optional
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
    doc = docstring_parser.parse(inspect.getdoc(function) or "")
    described = {one.arg_name: one.description for one in doc.params}
    hints = _hints(function, tool)
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    optional = set()
    for place, parameter in enumerate(inspect.signature(function).parameters.values()):
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


def _hints(function: Callable[..., Any], tool: str) -> dict[str, Any]:
    source = function if inspect.isroutine(function) else type(function).__call__
    try:
        return get_type_hints(source, include_extras=True)
    except (NameError, TypeError, AttributeError, SyntaxError) as error:
        raise ConfigurationError(
            f"tool {tool!r}: its type hints cannot be read: {error}; import the types that it "
            "names at the top of its module"
        ) from None


def _no_hint(name: str, tool: str) -> str:
    if name in ("self", "cls"):
        return (
            f"tool {tool!r}: it is a method; make a tool of the bound method, tool(object.{tool}), "
            "or write a class with name, description, schema and execute"
        )
    return f"tool {tool!r}: parameter {name!r} has no type hint; write {name}: str, for example"


def _field(hint: Any, parameter: inspect.Parameter, description: str | None) -> Any:
    named: Any = Annotated[hint, Field(alias=parameter.name)]
    default = ... if parameter.default is parameter.empty else parameter.default
    has_own = FieldInfo.from_annotation(hint).description or (
        isinstance(default, FieldInfo) and default.description
    )
    if description and not has_own:
        named = Annotated[named, Field(description=" ".join(description.split()))]
    return (named, default)


def _model(fields: dict[str, Any], names: Mapping[str, str], tool: str) -> type[BaseModel]:
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=False)
    try:
        model: type[BaseModel] = create_model(tool, __config__=config, **fields)
    except (PydanticUserError, TypeError) as error:
        culprit = next(
            (one for field, one in names.items() if not _is_usable(fields[field], config)), "?"
        )
        reason = str(error).splitlines()[0]
        raise ConfigurationError(
            f"tool {tool!r}: parameter {culprit!r} has a type that JSON cannot express: {reason}; "
            "use plain types, pydantic models, dataclasses or enums"
        ) from None
    return model


def _is_usable(field: Any, config: ConfigDict) -> bool:
    try:
        create_model("probe", __config__=config, only=field)
    except (PydanticUserError, TypeError):
        return False
    return True


def _schema(model: type[BaseModel], tool: str) -> dict[str, Any]:
    try:
        schema = model.model_json_schema(by_alias=True, schema_generator=Untitled)
    except PydanticUserError as error:
        reason = str(error).splitlines()[0]
        raise ConfigurationError(
            f"tool {tool!r}: a parameter has a type without JSON Schema: {reason}"
        ) from None
    schema.pop("title", None)
    return schema


def _one_number_type(value: Any) -> Any:
    """Write whole floats as integers: JSON has one number type, and 3.0 is an integer there."""
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
