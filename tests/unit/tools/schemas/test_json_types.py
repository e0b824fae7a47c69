"""Types of parameters at the edge of JSON: each can be given by a model, or is refused at once."""

import enum
import functools
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple

import orjson
import pytest
from pydantic import BaseModel, BeforeValidator, Field
from support.local_types import tool_of_local_types

from stepfleet.orchestrator import ConfigurationError, tool
from stepfleet.orchestrator.errors import ToolArgumentsError
from stepfleet.orchestrator.tools.definition import Tool
from stepfleet.orchestrator.tools.schemas.handles import schema_of


class Colour(enum.IntEnum):
    """Keys of an object may be such."""

    RED = 1


class Node(BaseModel):
    """A type that holds itself."""

    below: "list[Node]" = []
    kind: type[int] = int


class Odd(BaseModel):
    kind: type[int]


@dataclass
class OddPart:
    calls: dict[Literal[1, 2], int]


class Pair(NamedTuple):
    one: int
    two: int


class Unlike:
    """No type of JSON's."""


def made(hint: Any, *default: Any) -> Tool[..., Any]:
    """Return a tool whose parameter `x` has that hint."""

    def probe(x: Any) -> str:
        return ""

    probe.__annotations__["x"] = hint
    probe.__defaults__ = default or None
    return tool(probe)


NEVER = {
    "keys of numbers": dict[Literal[1, 2], int],
    "keys of tuples": dict[tuple[int, int], int],
    "keys of records": Mapping[Pair, int],
    "a class": type[int],
    "any class": type,
    "any enum": enum.Enum,
    "a generator": Generator[int, None, None],
    "items that nothing checks": list[Iterable[int]],
    "a choice of such": type[int] | type[str],
    "a part of a model": Odd,
    "a part of a dataclass": list[OddPart],
    "bytes": Literal[b"a"],
    "what may be left out": type[int] | None,
}


@pytest.mark.parametrize("what", NEVER)
def test_a_type_that_no_json_fits_is_refused_with_the_parameter_and_the_fix(what: str) -> None:
    """TOOL-10"""
    with pytest.raises(ConfigurationError, match=r"parameter 'x': .*; use|parameter 'x': .* text"):
        made(NEVER[what])


@pytest.mark.parametrize(
    ("hint", "given", "got"),
    [
        (dict[int, int], {"1": 2}, {1: 2}),
        (dict[Colour, int], {"1": 2}, {Colour.RED: 2}),
        (dict[date, int], {"2026-01-02": 2}, {date(2026, 1, 2): 2}),
        (dict[int | str, int], {"a": 2}, {"a": 2}),
        (dict[Literal["a", 1], int], {"a": 2}, {"a": 2}),
        (type[int] | str, "int", "int"),
        (Pair, [1, 2], Pair(1, 2)),
        (Annotated[type[int], BeforeValidator(lambda _: int)], "int", int),
        (Sequence[int], [1], [1]),
    ],
)
def test_a_type_that_some_json_fits_takes_it(hint: Any, given: Any, got: Any) -> None:
    assert made(hint).check({"x": given}) == {"x": got}


def test_a_type_that_holds_itself_is_taken() -> None:
    assert made(Node).check({"x": {"below": [{}]}})["x"].below[0].below == []


@pytest.mark.parametrize("hint", [Iterable[int], Iterable[int] | None, Annotated[Iterable[int], 1]])
def test_items_of_an_iterable_are_checked_before_the_tool_runs(hint: Any) -> None:
    probe = made(hint)
    assert probe.check({"x": [1, 2]}) == {"x": [1, 2]}
    with pytest.raises(ToolArgumentsError, match=r"x\.1.*valid integer"):
        probe.check({"x": [1, "a"]})


@pytest.mark.parametrize("pattern", ["^(?!bad)", "(?=a)", r"(a)\1", "["])
def test_a_pattern_that_cannot_be_checked_is_refused_at_once(pattern: str) -> None:
    for hint in (
        Annotated[str, Field(pattern=pattern)],
        list[Annotated[str, Field(pattern=pattern)]],
    ):
        with pytest.raises(ConfigurationError, match=r"'x' cannot be checked: .* look-around"):
            made(hint)
        with pytest.raises(ConfigurationError, match=r"cannot be checked: .* look-around"):
            schema_of(hint)


class OddDefault(BaseModel):
    part: float = float("nan")


@pytest.mark.parametrize("default", [float("nan"), float("inf"), object()])
def test_a_default_that_json_does_not_have_is_not_told_to_the_model(default: Any) -> None:
    probe = made(float, default)
    assert probe.schema["properties"] == {"x": {"type": "number"}}
    assert probe.check({}) == {}
    orjson.dumps(made(OddDefault).schema)
    assert "NaN" not in str(made(OddDefault).schema)


def test_nor_is_a_default_that_only_looks_like_a_time() -> None:
    pandas = pytest.importorskip("pandas")
    assert made(datetime, pandas.NaT).schema["properties"]["x"] == {
        "format": "date-time",
        "type": "string",
    }


@pytest.mark.parametrize("hint", [int, Annotated[int, Field(ge=1)], int | None, "int"])
def test_a_default_of_none_lets_null_through(hint: Any) -> None:
    probe = made(hint, None)
    assert probe.check({"x": None}) == {"x": None}
    assert probe.check({"x": 2}) == {"x": 2}
    assert probe.check({}) == {}
    with pytest.raises(ToolArgumentsError):
        probe.check({"x": "a"})


def test_a_default_in_the_hint_is_one() -> None:
    probe = made(Annotated[int, Field(default=3, description="how many")])
    assert probe.schema.get("required") is None
    assert probe.schema["properties"]["x"] == {
        "default": 3,
        "type": "integer",
        "description": "how many",
    }
    assert probe.check({}) == {"x": 3}
    assert made(Annotated[list[int], Field(default_factory=list)]).check({}) == {"x": []}
    assert made(Annotated[int, Field(default=3)], 5).check({}) == {}


def add(key: str, one: int, two: int = 2) -> int:
    """Add two numbers.

    Args:
        key: Who asks.
        one: The first.
        two: The second.
    """
    return len(key) + one + two


async def test_a_partial_function_offers_what_it_leaves_open() -> None:
    bound = tool(functools.partial(functools.partial(add, "secret"), one=1))
    assert (bound.name, bound.description) == ("add", "Add two numbers.")
    assert list(bound.schema["properties"]) == ["two"]
    assert bound.schema["properties"]["two"]["description"] == "The second."
    assert await bound.execute(two=5) == 12
    with pytest.raises(ToolArgumentsError, match="'one'"):
        await bound.execute(one=7)


def test_hints_may_name_local_types() -> None:
    probe = tool_of_local_types()
    assert probe.check({"given": {"size": 1}, "way": "up"})["given"].size == 1


def test_a_decimal_is_offered_as_text_and_taken_as_a_number_too() -> None:
    """A number would lose digits before it comes here."""

    @tool
    def pay(usd: Decimal, parts: list[Decimal] | None = None) -> str:
        return repr((usd, parts))

    properties = pay.schema["properties"]
    assert properties["usd"]["type"] == "string"
    assert not {"anyOf", "number"} & properties["usd"].keys()
    assert "number" not in str(properties["parts"])
    exact = "12345678901234567890.123456789"
    assert pay.check({"usd": exact, "parts": [exact]}) == {
        "usd": Decimal(exact),
        "parts": [Decimal(exact)],
    }
    assert pay.check({"usd": 1.5}) == {"usd": Decimal("1.5")}
    with pytest.raises(ToolArgumentsError, match="usd"):
        pay.check({"usd": "much"})
