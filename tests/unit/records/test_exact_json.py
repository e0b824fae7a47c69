"""JSON of foreign data: whole numbers of any size are the same behind it, and nothing is lost."""

import dataclasses
import enum
import json
import math
from decimal import Decimal
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfleet.orchestrator.records import exact_json

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


class Wei(enum.IntEnum):
    MOST = 2**64 - 1
    MORE = 2**64


@dataclasses.dataclass
class Amount:
    wei: int


@given(values)
def test_what_is_written_is_read_as_the_same(value: Any) -> None:
    written = exact_json.dumps(value)
    assert repr(exact_json.loads(written)) == repr(value)
    assert json.loads(written) == value


@given(values)
def test_the_form_is_that_of_orjson_whatever_the_size_of_numbers(value: Any) -> None:
    option = orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2
    large = exact_json.text({"large": 2**70, "value": value}, option=option)
    small = exact_json.text({"large": 7, "value": value}, option=option)
    assert large.replace(str(2**70), "7", 1) == small


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            [2**63, 2**64, -(2**63) - 1],
            "[9223372036854775808,18446744073709551616,-9223372036854775809]",
        ),
        ([math.nan, -math.inf, 2**64], "[null,null,18446744073709551616]"),
        ([Wei.MOST, Wei.MORE], "[18446744073709551615,18446744073709551616]"),
        (Amount(2**64), '{"wei":18446744073709551616}'),
        ((1, (2**64,)), "[1,[18446744073709551616]]"),
    ],
    ids=str,
)
def test_numbers_beyond_64_bits_are_written_in_full(value: Any, text: str) -> None:
    assert exact_json.text(value) == text


@pytest.mark.parametrize(
    "value",
    [object(), {1: 2**64}, ["\ud800", 2**64], 10**4300, Decimal(1), {2**64}],
    ids=["an object", "a key", "a surrogate", "too many digits", "a decimal", "a set"],
)
def test_what_has_no_json_form_is_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        exact_json.dumps(value)


def test_nan_is_read_of_records_alone() -> None:
    with pytest.raises(ValueError, match="expected"):
        exact_json.loads("[NaN]")
    (found,) = exact_json.loads("[NaN]", constants=True)
    assert math.isnan(found)


def test_a_value_without_an_end_is_refused() -> None:
    endless: list[Any] = [2**64]
    endless.append(endless)
    with pytest.raises(TypeError, match="nested deeper than 254 levels"):
        exact_json.dumps(endless)


def test_the_longest_number_is_kept_and_a_longer_one_refused() -> None:
    assert exact_json.loads(exact_json.dumps(10**4299)) == 10**4299
    with pytest.raises(ValueError, match="number"):
        exact_json.loads(b"1" * 4301)


@pytest.mark.parametrize("text", ["1.10", "1e5", "-0.0", "1E+2", "0.30000000000000004", "12.0"])
def test_a_fraction_is_written_as_it_was_read(text: str) -> None:
    (found,) = exact_json.loads_as_written(f"[{text}]".encode())
    assert found == float(text)
    assert exact_json.text([found]) == f"[{text}]"


@pytest.mark.parametrize(
    "text",
    [
        *('["1.5", NaN]', "[1e999]", "[1.5,]", '["\\ud800", 1.5]', '["\n", 1.5]', "", "[" * 9_000),
        "[" + "1" * 4301 + "]",
        "[" * 9_000 + "1.5" + "]" * 9_000,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_what_is_no_standard_json_is_refused_by_name(text: str) -> None:
    with pytest.raises(json.JSONDecodeError):
        exact_json.loads_as_written(text.encode())
