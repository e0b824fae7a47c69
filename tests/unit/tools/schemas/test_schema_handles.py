"""Schemas of types and dicts: one handle each, named, closed, and refused where unusable."""

import json
from datetime import date
from typing import Any, Literal

import pytest
from pydantic import BaseModel, TypeAdapter

from stepfleet.orchestrator import ConfigurationError
from stepfleet.orchestrator.tools.schemas.handles import LARGEST, handle_of, schema_of
from stepfleet.orchestrator.tools.schemas.patterns import MOST_PATTERNS


class Item(BaseModel):
    name: str
    price: float


class Order(BaseModel):
    items: list[Item]
    note: str | None = None


class Tree(BaseModel):
    value: int
    children: list["Tree"] = []


class Odd:
    """A class that pydantic knows nothing of."""


OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}}


def test_a_type_has_one_handle_named_after_it() -> None:
    """ANS-14"""
    assert schema_of(Order) is schema_of(Order)
    assert schema_of(Order).name == "Order"
    assert schema_of(Order).schema["title"] == "Order"


def test_a_stored_schema_finds_the_same_handle_again_without_the_type() -> None:
    """ANS-14"""
    stored = json.loads(json.dumps(schema_of(Order).schema))
    again = handle_of(stored)
    assert again is handle_of(stored)
    assert (again.name, again.schema) == ("Order", schema_of(Order).schema)


def test_a_dict_is_named_by_its_title_or_else_by_a_default() -> None:
    assert schema_of({**OPEN, "title": "Pair"}).name == "Pair"
    assert schema_of(OPEN).name == "structured"


def test_properties_that_a_schema_does_not_name_are_forbidden() -> None:
    """ANS-02"""
    assert schema_of(OPEN).problems({"a": 1, "b": 2}) is not None
    assert schema_of({**OPEN, "additionalProperties": True}).problems({"a": 1, "b": 2}) is None
    assert schema_of({"type": "object"}).problems({"b": 2}) is None


def test_nested_and_recursive_models_resolve() -> None:
    """ANS-02"""
    assert schema_of(Order).problems({"items": [{"name": "a", "price": 1}]}) is None
    told = schema_of(Tree).problems({"value": 1, "children": [{"value": "x"}]})
    assert told == "children.0.value: 'x' is not of type 'integer'"


def test_a_type_that_cannot_be_hashed_has_a_schema_too() -> None:
    made: Any = TypeAdapter(Order).json_schema()
    assert schema_of(made).name == "Order"


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (int | None, "allows null"),
        (type(None), "allows null"),
        ({"type": "array"}, "must describe an object"),
        ({"$ref": "#"}, "must describe an object"),
        ({"$ref": "https://example.com/schema"}, "nothing is fetched"),
        ({**OPEN, "properties": {"a": {"$ref": "#/$defs/none"}}}, "does not hold"),
        ({**OPEN, "hidden": {"type": "string"}, "properties": {"a": {"$ref": "#/hidden"}}}, "defs"),
        (
            {**OPEN, "required": "a"},
            r"the JSON Schema is not valid: required: 'a' is not of type 'array'",
        ),
        ({**OPEN, "properties": {"a": {"type": "nope"}}}, r"properties\.a\.type"),
        ({**OPEN, "properties": {"a": {"pattern": "(?=x)"}}}, "look-around"),
        ({**OPEN, "properties": {"a": {"pattern": r"(a)\1"}}}, "backreferences"),
        ({**OPEN, "properties": {"a": {"pattern": "((a{99}){99}){99}"}}}, "size limit"),
        ({**OPEN, "description": "x" * LARGEST}, "larger than the limit"),
        (
            {**OPEN, "patternProperties": {f"^{n}$": {} for n in range(MOST_PATTERNS + 1)}},
            "more than 100 patterns",
        ),
        (Odd, "has a type that JSON cannot express"),
    ],
)
def test_a_schema_that_could_not_be_kept_is_refused_with_its_fix(given: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        schema_of(given)


@pytest.mark.parametrize(
    ("output_type", "name", "data"),
    [
        (int, "int", 3),
        (list[Order], "list", [{"items": []}]),
        (tuple[int, str], "tuple", [1, "a"]),
        (Literal["yes", "no"], "Literal", "yes"),
        (date, "date", "2026-01-02"),
    ],
)
def test_data_that_is_no_object_is_the_value_of_one(output_type: Any, name: str, data: Any) -> None:
    """ANS-14"""
    handle = schema_of(output_type)
    assert (handle.type_name, handle.holds_value) == (name, True)
    assert handle.schema["type"] == "object"
    assert handle.problems({"value": data}) is None
    assert handle.answer({"value": data}) == data
    assert handle.problems({"value": None}) is not None
    assert handle.problems({}) is not None
    assert handle_of(handle.schema) is handle


def test_an_object_that_has_a_value_is_what_the_answer_is() -> None:
    class Holder(BaseModel):
        value: int

    assert not schema_of(Holder).holds_value
    assert schema_of(Holder).answer({"value": 1}) == {"value": 1}
    assert not schema_of(Order | None).holds_value


def test_ten_thousand_levels_of_schema_are_refused() -> None:
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(10_000):
        deep = {"type": "object", "properties": {"a": deep}}
    with pytest.raises(ConfigurationError, match="nested deeper than 100 levels"):
        schema_of(deep)


def test_another_dialect_cannot_switch_the_bounds_off() -> None:
    inner = {"$schema": "https://json-schema.org/draft/2020-12/schema", "pattern": "^(a+)+$"}
    handle = schema_of({"type": "object", "properties": {"a": inner}})
    assert "$schema" not in handle.schema["properties"]["a"]
