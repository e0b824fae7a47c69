from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from stepfleet.orchestrator.cli.terminal import count, moment, seconds, shown, shown_error, usd


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.42, "0.4 s"),
        (12.4, "12 s"),
        (185, "3 min 05 s"),
        (7800, "2 h 10 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_durations_have_the_units_that_people_use(value: Any, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "$0.00"),
        (1234.5, "$1,234.50"),
        (0.0123, "$0.0123"),
        (0.000052799999999999996, "$0.000053"),
        (0.0000042, "$0.0000042"),
        (0.0000000042, "$0.000000004"),
        (-0.0123, "-$0.0123"),
        (Decimal("-1234.5"), "-$1,234.50"),
    ],
)
def test_small_amounts_keep_their_digits(value: Any, text: str) -> None:
    assert usd(value) == text


def test_counts_have_thousands_separated() -> None:
    assert count(1_234_567) == "1,234,567"


def test_moments_are_utc_to_the_second() -> None:
    assert moment(datetime(2026, 1, 2, 3, 4, 5, 678, UTC)) == "2026-01-02 03:04:05 UTC"
    assert moment(None) == "-"


def test_foreign_text_cannot_control_the_terminal() -> None:
    assert "\x1b" not in shown("\x1b[31mred\x1b[0m\rgone")


def test_limited_text_is_one_line_of_that_length() -> None:
    assert shown("first\nsecond " + "x" * 100, 20) == "first second xxxxxx…"


def test_an_error_that_is_too_long_keeps_both_ends() -> None:
    nested = "run 1 of agent 'a' ended as error: " * 5 + "the card was refused"
    text = shown_error(nested, 60)
    assert len(text) <= 60
    assert text.startswith("run 1 of agent 'a'")
    assert text.endswith(" error: the card was refused")
    assert shown_error(nested) == nested
    assert shown_error("short\nand sweet", 60) == "short and sweet"


def test_data_that_is_no_text_is_shown_as_json() -> None:
    assert shown({"a": 1}) == '{"a":1}'
