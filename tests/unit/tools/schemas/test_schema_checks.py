"""Data against a schema: Draft 7, clear problems with their places, and bounds."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from stepfleet.orchestrator.tools.schemas.handles import handle_of, schema_of
from stepfleet.orchestrator.tools.schemas.validators import errors_of, validator_of


class Line(BaseModel):
    name: str
    count: int = Field(ge=1)
    unit: Literal["kg", "g"] = "kg"
    tags: set[str] = set()
    size: tuple[int, str] | None = None


class Bill(BaseModel):
    lines: list[Line]
    code: Annotated[str, Field(pattern=r"^[A-Z]{2}-\d+$")] = "AB-1"
    marks: dict[Annotated[str, Field(pattern=r"^x-")], int] = {}


def problems(data: Any) -> str | None:
    return schema_of(Bill).problems(data)


def line(**fields: Any) -> dict[str, Any]:
    return {"lines": [{"name": "a", "count": 1, **fields}]}


@pytest.mark.parametrize(
    "data",
    [
        {"lines": []},
        line(unit="g", tags=["x", "y"], size=[1, "a"]),
        line(count=3.0),
        {"lines": [], "code": "ZZ-99", "marks": {"x-a": 1}},
    ],
)
def test_data_that_fits_has_no_problems(data: Any) -> None:
    """ANS-05"""
    assert problems(data) is None


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({}, "<root>: 'lines' is a required property"),
        ([], "<root>: [] is not of type 'object'"),
        (line(count=0), "lines.0.count: 0 is less than the minimum of 1"),
        (line(unit="t"), "lines.0.unit: 't' is not one of ['kg', 'g']"),
        (line(tags=["x", "x"]), "lines.0.tags: ['x', 'x'] has items that are equal"),
        ({"lines": [], "code": "nope"}, r"code: 'nope' does not match '^[A-Z]{2}-\\d+$'"),
        ({"lines": [], "marks": {"x-a": "1"}}, "marks.x-a: '1' is not of type 'integer'"),
        ({"lines": [], "more": 1}, "<root>: additional properties are not allowed ('more')"),
        (
            line(size=["1", "a"]),
            (
                "lines.0.size: fits none of the allowed forms (0: '1' is not of type 'integer', "
                "['1', 'a'] is not of type 'null')"
            ),
        ),
    ],
)
def test_a_problem_names_the_place_and_the_rule(data: Any, told: str) -> None:
    """ANS-05, ANS-06"""
    assert problems(data) == told


def test_of_five_problems_three_are_reported_and_two_counted() -> None:
    """ANS-06"""
    wrong = {"lines": [{"name": number, "count": 1} for number in range(5)]}
    assert problems(wrong) == (
        "lines.0.name: 0 is not of type 'string'; lines.1.name: 1 is not of type 'string'; "
        "lines.2.name: 2 is not of type 'string'; and 2 more (truncated)"
    )


def test_of_very_many_problems_not_all_are_counted() -> None:
    told = problems({"lines": [1] * 50_000})
    assert told is not None
    assert told.endswith("and at least 98 more (truncated)")


def test_long_data_is_quoted_in_part_and_the_rule_stays() -> None:
    told = problems({"lines": [], "code": "a" * 100_000})
    assert told is not None
    assert len(told) < 300
    assert told.endswith(r"does not match '^[A-Z]{2}-\\d+$'")


def test_a_pattern_that_backtracks_without_end_elsewhere_is_matched_in_linear_time() -> None:
    evil = handle_of({"type": "object", "properties": {"a": {"pattern": "^(a+)+$"}}})
    assert evil.problems({"a": "a" * 50_000}) is None
    assert evil.problems({"a": "a" * 50_000 + "!"}) is not None


def test_a_check_that_takes_exponential_work_is_given_up() -> None:
    twice = {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/a"}}] * 2}
    evil = handle_of(
        {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": twice}}
    )
    data: list[Any] = []
    for _ in range(60):
        data = [data, 1]
    assert evil.problems({"x": data}) == (
        "<root>: takes too long to be checked against its schema; give less data"
    )


def test_a_schema_that_refers_to_itself_without_end_is_given_up() -> None:
    evil = handle_of({"type": "object", "properties": {"x": {"$ref": "#/properties/x"}}})
    assert evil.problems({"x": 1}) == (
        "<root>: is nested too deeply to be checked against its schema"
    )


def test_equal_items_are_found_among_very_many_objects() -> None:
    unique = handle_of(
        {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    )
    items = [{"n": number} for number in range(20_000)]
    assert unique.problems({"x": items}) is None
    assert unique.problems({"x": [*items, {"n": 7.0}]}) is not None
    assert unique.problems({"x": [1, True, "1"]}) is None


def test_references_without_end_are_given_up_wherever_the_stack_ends() -> None:
    """jsonschema's mappings, in Rust, raise no `Exception` where their part of the stack ends."""
    endless = {"type": ["string", "object"], "allOf": [{"$ref": "#/$defs/endless"}]}
    validator = validator_of({"$ref": "#/$defs/endless", "$defs": {"endless": endless}})

    def from_depth(depth: int) -> None:
        if depth:
            return from_depth(depth - 1)
        with pytest.raises(RecursionError):
            errors_of(validator, {}, 1)
        return None

    for depth in range(30):
        from_depth(depth)
