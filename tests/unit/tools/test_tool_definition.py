import inspect
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from stepfleet.orchestrator import ConfigurationError, tool
from stepfleet.orchestrator.errors import ToolArgumentsError
from stepfleet.orchestrator.tools import Tool, ToolLike, as_tool


class Unit(StrEnum):
    METRIC = "metric"
    IMPERIAL = "imperial"


class Place(BaseModel):
    """Where."""

    city: str
    zip_codes: list[int] = Field(default_factory=list, description="Postal codes.")


@dataclass
class Span:
    first: date
    last: date


@tool
def forecast(
    place: Place,
    unit: Unit = Unit.METRIC,
    days: Annotated[int, Field(ge=1, le=14, description="How far ahead.")] = 3,
    span: Span | None = None,
) -> str:
    """Tell the weather to come.

    Uses the best source.

    Args:
        place: The place that
            matters.
        unit: Of the answer.
        days: Ignored, since the annotation says more.
        span: Dates.

    Returns:
        Text.
    """
    return f"{place.city} {unit} {days} {span}"


def test_a_decorated_function_has_name_description_and_schema_of_its_signature_and_docstring() -> (
    None
):
    """TOOL-03: golden schema, with optional and nested parameters."""
    assert forecast.name == "forecast"
    assert forecast.description == "Tell the weather to come.\n\nUses the best source."
    assert forecast.schema == {
        "type": "object",
        "additionalProperties": False,
        "required": ["place"],
        "properties": {
            "place": {"$ref": "#/$defs/Place", "description": "The place that matters."},
            "unit": {
                "$ref": "#/$defs/Unit",
                "default": "metric",
                "description": "Of the answer.",
            },
            "days": {
                "type": "integer",
                "default": 3,
                "minimum": 1,
                "maximum": 14,
                "description": "How far ahead.",
            },
            "span": {
                "anyOf": [{"$ref": "#/$defs/Span"}, {"type": "null"}],
                "default": None,
                "description": "Dates.",
            },
        },
        "$defs": {
            "Place": {
                "type": "object",
                "title": "Place",
                "description": "Where.",
                "required": ["city"],
                "properties": {
                    "city": {"type": "string"},
                    "zip_codes": {
                        "type": "array",
                        "items": {"type": "integer"},
                        "description": "Postal codes.",
                    },
                },
            },
            "Unit": {"type": "string", "title": "Unit", "enum": ["metric", "imperial"]},
            "Span": {
                "type": "object",
                "title": "Span",
                "additionalProperties": False,
                "required": ["first", "last"],
                "properties": {
                    "first": {"type": "string", "format": "date"},
                    "last": {"type": "string", "format": "date"},
                },
            },
        },
    }


def test_arguments_arrive_as_the_types_of_the_signature() -> None:
    """TOOL-10: models, enums and dates are made of their JSON forms."""
    bound = forecast.check(
        {
            "place": {"city": "Ulm", "zip_codes": [89073.0]},
            "unit": "imperial",
            "span": {"first": "2024-05-01", "last": "2024-05-02"},
        }
    )
    assert bound == {
        "place": Place(city="Ulm", zip_codes=[89073]),
        "unit": Unit.IMPERIAL,
        "span": Span(date(2024, 5, 1), date(2024, 5, 2)),
    }


@tool
def typed(
    count: int = 0,
    ratio: float = 0.0,
    flag: bool = False,
    text: str = "",
    many: tuple[int, ...] = (),
    either: int | str = 0,
    one_of: Literal["a", "b"] = "a",
) -> None:
    """Take one of each."""


@pytest.mark.parametrize(
    ("argument", "value", "arrives"),
    [
        ("count", 3.0, 3),
        ("ratio", 3, 3.0),
        ("many", [1, 2], (1, 2)),
        ("either", "x", "x"),
        ("either", 4, 4),
        ("one_of", "b", "b"),
        ("count", 10**40, 10**40),
    ],
)
def test_the_forms_that_json_has_for_a_type_are_accepted(
    argument: str, value: Any, arrives: Any
) -> None:
    """TOOL-10: what the schema allows is accepted."""
    bound = typed.check({argument: value})
    assert bound == {argument: arrives}
    assert type(bound[argument]) is type(arrives)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("count", "3"),
        ("count", 3.5),
        ("count", True),
        ("count", None),
        ("ratio", "1.5"),
        ("flag", 1),
        ("flag", "yes"),
        ("text", 7),
        ("many", "1,2"),
        ("either", [1]),
        ("one_of", "c"),
    ],
)
def test_a_wrong_type_is_refused_by_name(argument: str, value: Any) -> None:
    """TOOL-10: nothing is coerced that JSON tells apart."""
    with pytest.raises(ToolArgumentsError, match=f"tool 'typed': field '{argument}"):
        typed.check({argument: value})


def test_missing_and_unknown_arguments_are_refused_by_name() -> None:
    """TOOL-10: missing required ones, and ones that nobody asked for."""
    with pytest.raises(ToolArgumentsError, match="field 'place' is missing"):
        forecast.check({})
    with pytest.raises(ToolArgumentsError, match="field 'colour' is not known"):
        typed.check({"colour": "red"})


def test_parameters_may_have_names_that_pydantic_reserves() -> None:
    """TOOL-03: no parameter name is special."""

    @tool
    def odd(model_config: str, schema: int, _hidden: int = 1, copy: str = "c") -> str:
        return f"{model_config} {schema} {_hidden} {copy}"

    assert list(odd.schema["properties"]) == ["model_config", "schema", "_hidden", "copy"]
    assert odd.check({"model_config": "a", "schema": 2, "_hidden": 3}) == {
        "model_config": "a",
        "schema": 2,
        "_hidden": 3,
    }


def test_defaults_in_field_objects_count() -> None:
    """TOOL-03: both places where pydantic lets one write a default."""

    @tool
    def fields(
        left: Annotated[list[int], Field(default_factory=lambda: [1])],
        right: int = Field(5, description="The right one."),
    ) -> int:
        return sum(left) + right

    assert fields.schema.get("required", []) == []
    assert fields.schema["properties"]["right"]["description"] == "The right one."
    assert fields.check({}) == {"left": [1], "right": 5}


@pytest.mark.parametrize(
    "doc",
    [
        "Say.\n\nArgs:\n    who: The one greeted.\n",
        "Say.\n\nParameters\n----------\nwho : str\n    The one greeted.\n",
        "Say.\n\n:param who: The one greeted.\n",
    ],
    ids=["google", "numpy", "rest"],
)
def test_parameter_descriptions_come_from_every_docstring_style(doc: str) -> None:
    """TOOL-03: Google, NumPy and reST."""

    def greet(who: str) -> str:
        return who

    greet.__doc__ = doc
    made = tool(greet)
    assert made.description == "Say."
    assert made.schema["properties"]["who"]["description"] == "The one greeted."


def test_a_tool_is_still_the_function_that_it_was() -> None:
    """TOOL-03: calling the tool calls the function, and its signature shows."""

    @tool(name="adder", description="Adds.", timeout=5, version="2", queue="gpu")
    def add(left: int, right: int = 1) -> int:
        return left + right

    assert add(2, right=3) == 5
    assert list(inspect.signature(add).parameters) == ["left", "right"]
    assert (add.name, add.description, add.version) == ("adder", "Adds.", "2")
    assert (add.options.timeout, add.options.queue) == (5, "gpu")
    with pytest.raises(AttributeError):
        add.name = "other"  # type: ignore[misc]


def test_tools_that_only_read_are_idempotent_and_others_are_not_unless_they_say_so() -> None:
    """TOOL-26: what may be run again when its outcome is unknown."""

    def act() -> None: ...

    assert not tool(act).idempotent
    assert tool(read_only=True)(act).idempotent
    assert tool(idempotent=True)(act).idempotent
    assert not tool(read_only=True, idempotent=False)(act).idempotent


async def test_sync_and_async_functions_both_execute() -> None:
    """TOOL-01: `execute` is a coroutine either way."""

    @tool
    def plain(number: int) -> int:
        return number + 1

    @tool
    async def later(number: int) -> int:
        return number + 2

    assert isinstance(plain, ToolLike)
    assert await plain.execute(number=1) == 2
    assert await later.execute(number=1) == 3
    assert (plain.blocking, later.blocking) == (True, False)


def no_hint(city) -> None: ...  # type: ignore[no-untyped-def] # noqa: ANN001
def star(*values: int) -> None: ...
def stars(**values: int) -> None: ...
def only(value: int, /) -> None: ...
def call_me(action: Callable[[], None]) -> None: ...
def unknown_hint(value: "Nowhere") -> None: ...  # type: ignore[name-defined] # noqa: F821
def made_of_object(value: inspect.Signature) -> None: ...
def yields(value: int) -> Any:
    yield value


class Holder:
    def method(self, value: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (no_hint, "tool 'no_hint': parameter 'city' has no type hint; write city: str"),
        (star, "parameter 'values' collects any number of values"),
        (stars, "parameter 'values' collects any keyword"),
        (only, "parameter 'value' is positional-only; remove the /"),
        (call_me, "tool 'call_me': no model could give parameter 'action': a function cannot"),
        (unknown_hint, "tool 'unknown_hint': its type hints cannot be read: name 'Nowhere'"),
        (made_of_object, "tool 'made_of_object': parameter 'value' has a type that JSON cannot"),
        (yields, "tool 'yields' yields; return the whole value instead"),
        (Holder.method, "it is a method; make a tool of the bound method"),
        (Holder, "@tool goes above a function"),
        (lambda: None, "tool '<lambda>': name must be 1 to 64 letters"),
    ],
)
def test_what_a_model_could_not_call_is_refused_at_decoration(
    function: Callable[..., Any], says: str
) -> None:
    """TOOL-03: the message names tool, parameter and fix."""
    with pytest.raises(ConfigurationError) as caught:
        tool(function)
    assert says in caught.value.message


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 10**9])
def test_a_timeout_that_is_no_span_of_time_is_refused(timeout: float) -> None:
    """TOOL-16"""
    with pytest.raises(ConfigurationError, match="timeout must be seconds"):
        tool(name="x", timeout=timeout)(lambda: None)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"approval": "yes"}, "approval is 'yes'; write True, False or a function"),
        ({"approval": True, "approval_timeout": "5"}, "approval_timeout must be seconds"),
        ({"approval": True, "approval_timeout": True}, "approval_timeout must be seconds"),
        ({"approval": True, "approval_timeout": 0}, "approval_timeout must be seconds"),
        (
            {"approval": True, "approval_timeout": 5, "approval_default": "no"},
            "approval_default is 'no'; write 'deny' or 'approve'",
        ),
    ],
)
def test_rules_of_approval_of_another_type_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        tool(name="x", **options)(lambda: None)
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"approval_timeout": 60, "approval_default": "deny"},
            "tool 'x': approval_timeout is 60, and no call waits for an approval; add approval",
        ),
        ({"approval": False, "approval_timeout": 60}, "add approval=True, or approval=FUNCTION"),
        (
            {"approval": True, "approval_default": "deny"},
            "tool 'x': approval_default is 'deny', and nothing says when it decides; add",
        ),
        ({"approval_default": "approve"}, "add approval_timeout=SECONDS"),
    ],
)
def test_options_of_an_approval_that_could_never_apply_are_refused(
    options: dict[str, Any], says: str
) -> None:
    """Without `approval` the tool would be called without asking, whatever the other two say."""
    with pytest.raises(ConfigurationError) as caught:
        tool(name="x", **options)(lambda: None)
    assert says in caught.value.message


@pytest.mark.parametrize("rule", [True, lambda _: True])
@pytest.mark.parametrize("default", [{}, {"approval_default": "approve"}])
def test_an_approval_may_have_a_time_limit_and_a_decision_for_it(
    rule: Any, default: dict[str, Any]
) -> None:
    made = tool(name="x", approval=rule, approval_timeout=60, **default)(lambda: None)
    assert made.options.approval is rule


class Lookup:
    name = "lookup"
    description = "Looks up."
    schema: Any = {  # noqa: RUF012 - as a user would write it
        "type": "object",
        "properties": {"key": {"$ref": "#/definitions/key"}},
        "required": ["key"],
        "definitions": {"key": {"type": "string", "minLength": 2}},
    }
    timeout = 7.0
    read_only = True

    async def execute(self, **kwargs: Any) -> str:
        return f"found {kwargs['key']}"


class SyncLookup(Lookup):
    name = "sync_lookup"

    def execute(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"found {kwargs['key']} at once"


async def test_a_class_with_the_protocol_is_a_tool_without_decorator() -> None:
    """TOOL-01: name, description, schema and execute, plain or coroutine, suffice."""
    found = as_tool(Lookup())
    assert isinstance(found, Tool)
    assert found.spec.parameters == Lookup.schema
    assert (found.options.timeout, found.idempotent, found.blocking) == (7.0, True, False)
    assert await found.execute(key="abc") == "found abc"
    plain = as_tool(SyncLookup())
    assert plain.blocking
    assert await plain.execute(key="abc") == "found abc at once"


def test_the_arguments_of_a_class_tool_are_checked_against_its_schema() -> None:
    """TOOL-10: path and message of each problem."""
    found = as_tool(Lookup())
    with pytest.raises(ToolArgumentsError, match="<root>: 'key' is a required property"):
        found.check({})
    with pytest.raises(ToolArgumentsError, match="key: 'a' is too short"):
        found.check({"key": "a"})


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "array"}, "schema must be a JSON Schema of an object"),
        ({"type": "object", "properties": []}, "schema must be a JSON Schema of an object"),
        ({"type": "object", "required": 3}, "schema is not valid: required"),
        (
            {"type": "object", "properties": {"key": {"$ref": "http://127.0.0.1:9/x.json"}}},
            "schema refers to 'http://127.0.0.1:9/x.json', which it does not hold",
        ),
    ],
)
def test_a_schema_that_cannot_serve_is_a_configuration_error(
    schema: dict[str, Any], says: str
) -> None:
    """TOOL-10: nothing is fetched either."""
    own = Lookup()
    own.schema = schema
    with pytest.raises(ConfigurationError) as caught:
        as_tool(own).check({"key": "abc"})
    assert says in caught.value.message


def test_an_unknown_option_is_refused_with_the_close_one() -> None:
    def refund(usd: float) -> str:
        return f"{usd}"

    made: Any = tool
    with pytest.raises(ConfigurationError) as caught:
        made(aproval=True)(refund)
    assert caught.value.message == (
        "tool 'refund': option 'aproval' is not known; did you mean 'approval'?"
    )
    with pytest.raises(ConfigurationError, match="option 'xyz' is not known; there are timeout, "):
        made(xyz=1)(refund)
