import itertools
import json
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfleet.orchestrator import ToolCall
from stepfleet.orchestrator.tools import drop_leaked_arguments, parse_tool_call


def ids() -> Callable[[], str]:
    count = itertools.count(1)
    return lambda: f"made-{next(count)}"


def parse(raw: Any, **limits: int) -> ToolCall:
    return parse_tool_call(raw, new_id=ids(), **limits)


TEXT = '{"city": "Ulm", "days": 3}'
DATA = {"city": "Ulm", "days": 3}
SHAPES = {
    "own type": ToolCall(id="c1", name="weather", arguments=DATA),
    "object with function object": SimpleNamespace(
        id="c1", function=SimpleNamespace(name="weather", arguments=TEXT)
    ),
    "object with function dict": SimpleNamespace(
        id="c1", function={"name": "weather", "arguments": TEXT}
    ),
    "nested dict": {
        "id": "c1",
        "type": "function",
        "function": {"name": "weather", "arguments": TEXT},
    },
    "flat dict": {"id": "c1", "name": "weather", "arguments": TEXT},
    "object with name": SimpleNamespace(id="c1", name="weather", arguments=TEXT),
    "arguments as mapping": {"id": "c1", "name": " weather ", "arguments": DATA},
    "no function but its key": {"id": "c1", "function": None, "name": "weather", "arguments": DATA},
}


@pytest.mark.parametrize("raw", SHAPES.values(), ids=SHAPES.keys())
def test_every_shape_gives_the_same_call(raw: Any) -> None:
    """TOOL-06: table of shapes."""
    assert parse(raw) == ToolCall(id="c1", name="weather", arguments=DATA)


@pytest.mark.parametrize("arguments", [None, "", "  ", "{}", {}, "null", " null\n"])
def test_no_arguments_are_an_empty_object(arguments: Any) -> None:
    """TOOL-06: providers write the arguments of a parameterless call in several ways."""
    assert parse({"id": "c", "name": "now", "arguments": arguments}) == ToolCall(id="c", name="now")


@pytest.mark.parametrize("given_id", [None, "", "  ", "a\x00b", "\ud800", "x" * 600, True, 1.5])
def test_a_missing_or_unusable_id_is_generated(given_id: Any) -> None:
    """TOOL-08"""
    call = parse({"id": given_id, "name": "now"})
    assert call.id == "made-1"
    assert call.error is None


def test_an_id_that_is_a_number_becomes_text() -> None:
    """TOOL-08"""
    assert parse({"id": 17, "name": "now"}).id == "17"


@pytest.mark.parametrize(
    ("raw", "name", "says"),
    [
        ({"id": "c"}, "unknown", "the call names no tool"),
        ({"id": "c", "function": {}}, "unknown", "the call names no tool"),
        ({"id": "c", "name": "  "}, "unknown", "the call names no tool"),
        ({"id": "c", "name": 5}, "unknown", "must be text, and is of type int"),
        ({"id": "c", "name": "a\x00b"}, "unknown", "not a valid name"),
        ({"id": "c", "name": "x" * 300}, "unknown", "not a valid name"),
        (None, "unknown", "the call names no tool"),
        ("just text", "unknown", "the call names no tool"),
        ({"name": "w", "arguments": "{city: 1}"}, "w", "not valid JSON: Expecting property name"),
        ({"name": "w", "arguments": '{"a": 1'}, "w", "got '{\"a\": 1'"),
        ({"name": "w", "arguments": "[1]"}, "w", "must be a JSON object; got '[1]'"),
        ({"name": "w", "arguments": "true"}, "w", "must be a JSON object"),
        ({"name": "w", "arguments": 5}, "w", "they must be a JSON object, and are of type int"),
        ({"name": "w", "arguments": b"{}"}, "w", "are of type bytes"),
        ({"name": "w", "arguments": '{"a": NaN}'}, "w", "NaN is not a JSON number"),
        ({"name": "w", "arguments": '{"a": 1e999}'}, "w", "out of range"),
        ({"name": "w", "arguments": {"a": float("inf")}}, "w", "infinite"),
        ({"name": "w", "arguments": {"a": {1}}}, "w", "type set is not JSON data"),
        ({"name": "w", "arguments": {1: "a"}}, "w", "key of type int is not text"),
        ({"name": "w", "arguments": '{"a": "\\u0000"}'}, "w", "NUL"),
        ({"name": "w", "arguments": '{"\\ud800": 1}'}, "w", "lone surrogate"),
        ({"name": "w", "arguments": '{"a": "\ud800"}'}, "w", "lone surrogate"),
        ({"name": "w", "arguments": '{"a": ' + "9" * 4301 + "}"}, "w", "more than 4300 digits"),
        ({"name": "w", "arguments": {"a": 10**4300}}, "w", "more than 4300 digits"),
        ({"name": "w", "arguments": '{"a":' + "[" * 100 + "]" * 100 + "}"}, "w", "100 levels"),
        ({"name": "w", "arguments": "[" * 500_000}, "w", "100 levels"),
        ({"name": "w", "arguments": '{"a": "' + "x" * 2**20 + '"}'}, "w", "1048576 bytes"),
        ({"name": "w", "arguments": {"a": "x" * 2**20}}, "w", "1048576 bytes"),
    ],
)
def test_a_bad_call_carries_a_clear_error_and_raises_nothing(
    raw: Any, name: str, says: str
) -> None:
    """TOOL-07: no name, bad arguments, out of bounds."""
    call = parse(raw)
    assert call.name == name
    assert call.arguments == {}
    assert call.error is not None
    assert says in call.error
    assert len(call.error) < 500
    assert ToolCall.from_json(call.to_json()) == call


def test_what_is_just_within_the_bounds_is_accepted() -> None:
    """TOOL-07: the bounds are where they are said to be."""
    nested = '{"a":' + "[" * 99 + "]" * 99 + "}"
    number = "9" * 4300
    assert parse({"name": "w", "arguments": nested}).error is None
    assert parse({"name": "w", "arguments": f'{{"a": -{number}}}'}).error is None
    assert parse({"name": "w", "arguments": '{"a": "12"}'}, max_arguments=11).error is None
    assert parse({"name": "w", "arguments": '{"a": "12"}'}, max_arguments=10).error is not None
    assert parse({"name": "w", "arguments": '{"a": "ä"}'}, max_arguments=10).error is not None


def test_the_digit_limit_holds_where_python_s_own_is_off() -> None:
    """TOOL-07: no quadratic conversion, whatever the process has set."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        call = parse({"name": "w", "arguments": '{"a": ' + "9" * 1_000_000 + "}"})
    finally:
        sys.set_int_max_str_digits(before)
    assert "4300 digits" in str(call.error)


def test_a_value_that_contains_itself_or_multiplies_ends_as_an_error() -> None:
    """TOOL-07: neither endless nor exponential values hang the parser."""
    loop: dict[str, Any] = {}
    loop["a"] = loop
    wide: Any = ["x"] * 10
    for _ in range(60):
        wide = [wide] * 10
    begun = time.monotonic()
    assert "levels" in str(parse({"name": "w", "arguments": loop}).error)
    assert "more than 30000 values" in str(parse({"name": "w", "arguments": {"a": wide}}).error)
    assert time.monotonic() - begun < 60


def test_an_own_call_that_is_an_error_already_stays_one() -> None:
    """TOOL-06: parsing twice changes nothing."""
    bad = parse({"id": "c", "name": "w", "arguments": "[]"})
    assert parse(bad) == bad


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00")),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(
            st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00")), inner
        )
    ),
    max_leaves=20,
)
ANYTHING = st.recursive(
    JSON | st.text(st.characters()) | st.binary() | st.floats() | st.sets(st.integers()),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(
            st.sampled_from(["id", "name", "function", "arguments", "type"]) | st.integers(), inner
        )
    ),
)


@given(ANYTHING)
def test_anything_at_all_gives_a_call_that_can_be_stored(raw: Any) -> None:
    """TOOL-07: property; no input raises, and the result survives the store."""
    call = parse(raw)
    assert call.id
    assert call.name
    assert ToolCall.from_json(call.to_json()) == call


@given(st.text(st.characters()))
def test_any_text_as_arguments_gives_a_call(text: str) -> None:
    """TOOL-07: property."""
    call = parse({"id": "c", "name": "w", "arguments": text})
    assert call.error is None or call.arguments == {}


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])).filter(lambda key: "\x00" not in key),
        JSON,
    )
)
def test_arguments_are_the_same_as_text_and_as_mapping(arguments: dict[str, Any]) -> None:
    """TOOL-06: property over all JSON objects."""
    as_data = parse({"id": "c", "name": "w", "arguments": arguments})
    as_text = parse({"id": "c", "name": "w", "arguments": json.dumps(arguments)})
    assert as_data == as_text == ToolCall(id="c", name="w", arguments=arguments)


CALLS = (
    ToolCall(id="a", name="w", arguments={"city": "Ulm", "days": 3}),
    ToolCall(id="b", name="w", error="bad"),
)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('{"city": "Ulm", "days": 3}', False),
        (' \n{"days":3,"city":"Ulm"}\n', False),
        ('{"city": "Ulm"}', True),
        ('{"city": "Ulm", "days": 4}', True),
        ("I look it up.", True),
        ('I look it up: {"city": "Ulm", "days": 3}', True),
        ("", True),
        ("{not json", True),
        ("{" * 10_000, True),
        ("[]", True),
    ],
)
def test_text_that_is_the_arguments_of_a_call_is_dropped_and_no_other(
    text: str, kept: bool
) -> None:
    """MSG-15, MSG-14: arguments never stand in for text, and words beside a call are kept."""
    assert drop_leaked_arguments(text, CALLS) == (text if kept else "")
