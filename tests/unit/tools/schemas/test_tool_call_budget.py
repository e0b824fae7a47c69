"""What a model writes as data is bounded in its values too: each costs more than its bytes."""

import tracemalloc
from typing import Any

import pytest

from stepfleet.orchestrator import ToolCall, tool
from stepfleet.orchestrator.agents.planning import is_planning_response
from stepfleet.orchestrator.errors import ToolArgumentsError
from stepfleet.orchestrator.models.failures import redact
from stepfleet.orchestrator.tools import drop_leaked_arguments, parse_tool_call
from stepfleet.orchestrator.tools.schemas.bounded_json import (
    MAX_VALUES,
    BoundsError,
    load_bounded,
    plain_json,
)
from stepfleet.worker.models.bodies import read_json

MEGABYTE = 1024 * 1024


@pytest.mark.parametrize(
    "text",
    [
        "[" + "[]," * (MAX_VALUES + 1) + "[]]",
        "[" + "1," * (MAX_VALUES + 1) + "1]",
        "{" + ",".join(f'"{n}":1' for n in range(MAX_VALUES + 1)) + "}",
    ],
    ids=["lists", "numbers", "names"],
)
def test_data_of_very_many_values_are_refused(text: str) -> None:
    """1 MiB of `[]` is 350,000 lists, each copied, checked and told of."""
    with pytest.raises(BoundsError, match="more than 30000 values; give less data"):
        load_bounded(text)
    raw = {"id": "c", "function": {"name": "n", "arguments": f'{{"a": {text}}}'}}
    call = parse_tool_call(raw, new_id=lambda: "x")
    assert call.error is not None
    assert "values" in call.error
    assert len(call.error) < 500


def test_as_many_values_as_allowed_are_taken() -> None:
    assert len(plain_json([1] * (MAX_VALUES - 1))) == MAX_VALUES - 1


def test_arguments_that_are_all_wrong_are_reported_without_a_copy_of_each() -> None:
    """250,000 wrong items of a union took 13 s and 1 GB."""

    @tool
    def take(items: list[int | float | bool | dict[str, int] | None]) -> str:
        """Take items."""
        return str(len(items))

    tracemalloc.start()
    try:
        with pytest.raises(ToolArgumentsError, match="and 119985 more") as caught:
            take.check(parsed({"items": ["x"] * (MAX_VALUES - 3)}))
        assert tracemalloc.get_traced_memory()[1] < 100 * MEGABYTE
    finally:
        tracemalloc.stop()
    assert len(caught.value.message) < 1000


def parsed(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments as they reach a tool."""
    raw = {"id": "c", "function": {"name": "n", "arguments": arguments}}
    call = parse_tool_call(raw, new_id=lambda: "x")
    assert call.error is None
    return call.arguments


def test_many_wrong_arguments_behind_good_ones_are_counted() -> None:
    @tool
    def take(items: list[int]) -> str:
        """Take items."""
        return str(len(items))

    with pytest.raises(ToolArgumentsError, match="1000 of the values in it are wrong"):
        take.check({"items": [1] * 100 + ["x"] * 1000})


class Counting(dict[str, Any]):
    """Arguments that note when they are looked through."""

    walked = 0

    def items(self) -> Any:
        self.walked += 1
        return super().items()


def test_calls_are_not_looked_through_for_a_text_that_differs() -> None:
    call = ToolCall(id="c", name="n", arguments={})
    arguments = Counting({"a": [1] * 10})
    object.__setattr__(call, "arguments", arguments)
    assert drop_leaked_arguments('{"b": 1}', [call] * 3) == '{"b": 1}'
    assert arguments.walked == 0
    assert not drop_leaked_arguments('{"a": [1,1,1,1,1,1,1,1,1,1]}', [call])


@pytest.mark.parametrize(("given", "written"), [(True, "1"), (1.0, "1"), (1, "true")])
def test_equal_values_that_are_written_otherwise_are_other_arguments(
    given: Any, written: str
) -> None:
    call = ToolCall(id="c", name="n", arguments={"a": given})
    assert drop_leaked_arguments(f'{{"a": {written}}}', [call]) == f'{{"a": {written}}}'


def test_control_characters_by_the_megabyte_are_mended() -> None:
    """One pass for each of them, not for each place."""
    assert read_json(b'{"a": "' + b"\x01\x02" * 300_000 + b'"}') == {"a": "\x01\x02" * 300_000}


def test_the_text_of_a_failure_is_cut_before_it_is_searched() -> None:
    said = redact("sk-secret-key " + "Bearer " * (2 * MEGABYTE), None)
    assert said.startswith("[key] [key]")
    assert len(said) < 5000


def test_a_plan_is_recognized_in_the_beginning_of_a_text() -> None:
    assert is_planning_response("My plan: ...")
    assert not is_planning_response("x" * MEGABYTE + " plan")
