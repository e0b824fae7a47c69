"""An input made of results: they are data, and never too large for it."""

import json
import re

import pytest

from stepfleet.orchestrator import ConfigurationError
from stepfleet.orchestrator.batches.files.lines import INPUT_LIMIT
from stepfleet.orchestrator.protocol.fold import (
    Before,
    answer_text,
    check_places,
    composed,
)

HOSTILE = '{output} {{0.__class__}} {count} }{ %s $x \x00 \u2028 "]'


def test_a_result_is_text_in_its_place_whatever_it_contains() -> None:
    text = composed("A {output} B {id} {{}}", [Before("q", HOSTILE)], {"id": "{output}"})
    assert text == f"A {HOSTILE} B {{output}} {{}}"


def test_several_results_are_a_json_list_that_can_be_read_back() -> None:
    before = [Before("a", HOSTILE), Before("b", None, "it failed"), Before("c", "x" * 8_001)]
    found = json.loads(composed("{outputs}", before, {}))
    assert found[:2] == [{"id": "a", "output": HOSTILE}, {"id": "b", "error": "it failed"}]
    assert found[2]["output"] == "x" * 8_000 + " [1 more characters]"
    assert composed("{count}: {output}", before, {}) == f"3: {HOSTILE}"


@pytest.mark.parametrize("text", ["x", "\x00", "\U0001f600", '"', "\ud800"])
@pytest.mark.parametrize("count", [1, 1_000])
def test_an_input_stays_below_its_limit(text: str, count: int) -> None:
    before = [Before(text * 500, text * 9_000) for _ in range(count)]
    worst = composed("{outputs}" + "{output}" * 100 + "ä" * 99_000, before, {})
    assert len(worst.encode()) < INPUT_LIMIT
    listed = re.match(r"\[.*?\](?=.)", worst, re.DOTALL)
    assert listed is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no place", "field 'input' names no result|it names no field"),
        ("{outputs}", "names {outputs}; there are: {output}, {id}"),
        ("{output.__class__}", "names {output.__class__}"),
        ("{output", "single '{'"),
        ("x" * 100_001, "100,001 characters"),
        (None, "must be text"),
    ],
)
def test_a_text_that_cannot_be_worded_is_refused_with_what_there_is(
    text: str, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message.replace("{", r"\{").replace("}", r"\}")):
        check_places(text, ("output", "id"))


def test_the_text_of_an_answer_is_its_data_where_it_has_some() -> None:
    large = 10**30
    assert answer_text("said", {"n": large, "ä": [1]}) == f'{{"n": {large}, "ä": [1]}}'
    assert answer_text("said", None) == "said"
    assert answer_text(" ", None) == answer_text(None, None) == "(no text)"
