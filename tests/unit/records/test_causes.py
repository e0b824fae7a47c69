"""Equal errors have one cause; its text is bounded, and made in linear time."""

import subprocess
import sys
import time

import pytest

from stepfleet.orchestrator.records.errors import Cause, ErrorInfo, ErrorType, cause_of
from stepfleet.orchestrator.records.text.validation import LONGEST, common_form


def _error(message: str, *, tool: str | None = None, code: str = "X") -> ErrorInfo:
    kind = ErrorType.TOOL if tool else ErrorType.MODEL
    return ErrorInfo(type=kind, code=code, message=message, tool_name=tool)


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        ("gadget 17 missing", "gadget 18 missing", "gadget # missing"),
        ("down (request req_aBcD)", "down", "down"),
        ("took 3.5 s", "took 1,204.25 s", "took # s"),
        ("no product 'lamp'", "no product 'it is'", "no product '…'"),
        ("can't find \"O'Brien\"", 'can\'t find "x"', "can't find '…'"),
        ("one of 'a', 'b'", "one of 'a', 'b', 'c'", "one of '…'"),
        ("order A1B2C3 of req_01HXY2", "order F9E8D7 of req_09ABC3", "order # of #"),
        (
            "run 3f2a91c0-1111-4222-8333-aaaabbbbcccc",
            "run 00000000-0000-0000-0000-000000000000",
            "run #",
        ),
        ("at 0x7f00ab12", "at 0xdeadbeef1", "at #"),
        ("since 2026-11-22T19:32:06.1Z", "since 2025-01-02T03:04:05.99Z", "since #Z"),
        ("rows [1, 2, 3]", "rows [4]", "rows [#]"),
        (
            "GET https://u:pw@shop.org/items/17/price?key=1#a",
            "GET https://shop.org/items/204/price?key=2",
            "GET https://shop.org/items/#/price",
        ),
        ("two\nlines 1", "two   lines 2", "two lines #"),
        ("bad JSON: '" + "{1: a}" * 2000, "bad JSON: '" + "[b, 2]" * 900, "bad JSON: '…'"),
    ],
)
def test_texts_that_differ_in_a_number_an_id_or_a_value_have_one_form(
    one: str, other: str, common: str
) -> None:
    assert common_form(one) == common
    assert common_form(other) == common
    assert cause_of(_error(one)).key == cause_of(_error(other)).key


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("gadget missing", "gadget broken"),
        ("api.openai.com answered 401: no", "api.openai.com answered 429: no"),
        ("Client error '404 Not Found' for it", "Server error '500 Internal' for it"),
        ("GET https://a.org/items/1", "GET https://b.org/items/1"),
    ],
)
def test_texts_that_say_something_else_have_another_form(one: str, other: str) -> None:
    assert common_form(one) != common_form(other)


def test_tool_model_kind_and_code_are_part_of_the_cause() -> None:
    given = [
        cause_of(_error("no")),
        cause_of(_error("no", code="Y")),
        cause_of(_error("no"), "openai:a"),
        cause_of(_error("no"), "openai:b"),
        cause_of(_error("no", tool="stock")),
        cause_of(_error("no", tool="price")),
    ]
    assert len({cause.key for cause in given}) == len(given)


def test_a_tools_error_has_the_same_cause_under_every_model() -> None:
    error = _error("no", tool="stock")
    assert cause_of(error, "openai:a") == cause_of(error, "openai:b")


def test_the_key_is_the_same_in_every_process_and_survives_json() -> None:
    cause = cause_of(_error("gadget 17 missing", tool="stock"))
    code = (
        "from stepfleet.orchestrator.records.errors import Cause;"
        "print(Cause(kind='tool', code='X', tool='stock', text='gadget # missing').key)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    assert printed.strip() == cause.key
    assert Cause.model_validate(cause.to_dict()) == cause


@pytest.mark.parametrize(
    "part", ["'", "'\\", "\"a'", "#1", "1,", "a://", " (request ", "http ", "`a", "'\n"]
)
def test_a_hostile_text_costs_little_and_gives_a_short_form(part: str) -> None:
    began = time.process_time()
    form = common_form(part * 1_000_000)
    assert time.process_time() - began < 5  # processor seconds
    assert len(form) <= LONGEST


def test_a_secret_of_the_environment_is_not_in_a_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_TOKEN", "swordfishes")
    cause = cause_of(_error("the door says swordfishes"))
    assert cause.text == "the door says [redacted]"


def test_lone_surrogates_have_a_key() -> None:
    assert len(Cause(kind="tool", text="\ud800").key) == len("0123456789")
