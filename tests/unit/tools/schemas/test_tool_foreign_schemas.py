"""Schemas that were written elsewhere: bounded, whatever they and the arguments are."""

import time
from typing import Any

import pytest

from stepfleet.orchestrator import ConfigurationError
from stepfleet.orchestrator.errors import ToolArgumentsError
from stepfleet.orchestrator.tools.schemas.checks import checker_of

DRAFTS = [
    {},
    {"$schema": "http://json-schema.org/draft-07/schema#"},
    {"$schema": "https://json-schema.org/draft/2019-09/schema"},
    {"$schema": "https://json-schema.org/draft/2020-12/schema"},
]
EVIL = "^(([a-z])+.)+[A-Z]([a-z])+$"
LONG = "a" * 50_000


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        ({"properties": {"text": {"pattern": EVIL}}}, {"text": LONG}),
        ({"patternProperties": {EVIL: {"type": "integer"}}, "required": ["x"]}, {LONG: 1}),
        (
            {"patternProperties": {EVIL: {"type": "integer"}}, "additionalProperties": False},
            {LONG: 1},
        ),
        ({"propertyNames": {"pattern": EVIL}}, {LONG: 1}),
        (
            {"properties": {"all": {"uniqueItems": True}}},
            {"all": [{"n": n} for n in range(20_000)] + [{"n": 1}]},
        ),
        (
            {
                "definitions": {
                    "d": {"anyOf": [{"items": {"$ref": "#/definitions/d"}, "minItems": 9}] * 8}
                },
                "properties": {"deep": {"$ref": "#/definitions/d"}},
            },
            {"deep": [[[[[[[[[[]]]]]]]]]]},
        ),
    ],
)
def test_arguments_that_keep_other_engines_busy_for_ever_are_refused_soon(
    draft: dict[str, Any], schema: dict[str, Any], arguments: dict[str, Any]
) -> None:
    """TOOL-10: Python's engine would need years, and this test its time limit."""
    with pytest.raises(ToolArgumentsError) as caught:
        checker_of("t", {"type": "object", **draft, **schema})(arguments)
    assert len(caught.value.message) < 2000


LOOKAHEAD = {"type": "object", "properties": {"text": {"pattern": "^(?!x)a+$", "maxLength": 5}}}


def test_a_pattern_with_look_around_is_refused_with_the_fix() -> None:
    with pytest.raises(ConfigurationError, match="write it without look-around"):
        checker_of("t", LOOKAHEAD)({"text": "aaa"})


def test_a_pattern_with_look_around_is_left_to_a_server_that_checks_again() -> None:
    check = checker_of("t", LOOKAHEAD, checked_again=True)
    assert check({"text": "xaa"}) == {"text": "xaa"}
    with pytest.raises(ToolArgumentsError, match="text: 'aaaaaa' is too long"):
        check({"text": "aaaaaa"})


@pytest.mark.parametrize("draft", DRAFTS[2:])
def test_unevaluated_properties_beside_patterns_are_matched_in_linear_time(
    draft: dict[str, Any],
) -> None:
    inner = {"patternProperties": {EVIL: {}, "^n": {"type": "integer"}}}
    schema = {"type": "object", **draft, "allOf": [inner], "unevaluatedProperties": False}
    check = checker_of("t", schema)
    assert check({"n1": 1}) == {"n1": 1}
    with pytest.raises(ToolArgumentsError, match="unevaluated properties are not allowed"):
        check({LONG: 1})


@pytest.mark.parametrize("draft", DRAFTS[2:])
def test_tens_of_thousands_of_unevaluated_names_and_items_are_judged(draft: dict[str, Any]) -> None:
    """TOOL-10: each one is looked up, and not in a list."""
    branch = {"patternProperties": {"^n": {"type": "integer"}}}
    names = {"$ref": "#/$defs/names", "unevaluatedProperties": False}
    items = {"if": {"items": {"type": "integer"}}, "unevaluatedItems": False}
    schema = {
        "type": "object",
        **draft,
        "$defs": {"names": branch},
        "properties": {"names": names, "items": items},
    }
    check = checker_of("t", schema)
    check({"names": {"n": 1}, "items": [1]})  # made when it is first used
    took = []
    for most in (1_250, 10_000):
        data = {"names": {f"n{n}": n for n in range(most)}, "items": list(range(most))}
        begun = time.thread_time()
        assert check(data) == data
        took.append(time.thread_time() - begun)
    assert took[1] < 16 * took[0], "eight times as many, not 64 times as long"


def test_dependencies_of_old_dialects_count_in_new_ones() -> None:
    """Many schemas of draft 7 name no dialect."""
    check = checker_of("t", {"type": "object", "dependencies": {"a": ["b"]}})
    assert check({"a": 1, "b": 2})
    with pytest.raises(ToolArgumentsError, match="'b' is a dependency of 'a'"):
        check({"a": 1})


def test_a_schema_of_draft_3_may_extend_another() -> None:
    draft = {"$schema": "http://json-schema.org/draft-03/schema#"}
    inner = {"extends": {"properties": {"b": {"type": "integer", "required": True}}}}
    check = checker_of("t", {**draft, "type": "object", "properties": {"a": inner}})
    assert check({"a": {"b": 1}})
    with pytest.raises(ToolArgumentsError, match=r"a\.b: 'b' is a required property"):
        check({"a": {}})


def test_a_schema_of_ten_thousand_levels_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(10_000):
        schema = {"properties": {"a": schema}}
    with pytest.raises(ConfigurationError, match="nested too deeply"):
        checker_of("t", {"type": "object", **schema})({"a": {}})
