"""Numbers of a file reach a prompt as the file writes them; whole ones of any size are exact."""

import decimal
import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from stepfleet.orchestrator import ConfigurationError
from stepfleet.orchestrator.batches.files.lines import RowRules, parse_line, read_object
from stepfleet.orchestrator.batches.files.source import open_input
from stepfleet.orchestrator.records import exact_json

PROMPT = "Pay {amount} at {rate}; {all}"
NUMBERS = '"amount": 18446744073709551616, "rate": 1.10, "all": [1e5, 0.30, -0.0, 2E+3]'
SAID = "Pay 18446744073709551616 at 1.10; [1e5,0.30,-0.0,2E+3]"


def said(name: str, data: bytes, prompt: str | None = PROMPT) -> list[str]:
    Path(name).write_bytes(data)
    with open_input(name) as source:
        rows = [read_object(line.data or b"") for line in source]
    rules = RowRules(None if prompt else "row", is_table=not name.startswith("line"))
    return [rules.line_of(row, prompt).messages[0].text for row in rows]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", f'{{"id": "a", {NUMBERS}}}\n'),
        ("a.json", f'[{{"id": "a", {NUMBERS}}}]'),
        ("a.csv", 'amount,rate,all\n18446744073709551616,1.10,"[1e5,0.30,-0.0,2E+3]"\n'),
    ],
)
def test_a_prompt_has_the_numbers_of_its_row_as_they_are_written(name: str, data: str) -> None:
    assert said(name, data.encode()) == [SAID]


def test_a_dict_that_is_sent_as_json_has_its_numbers_as_they_are_written() -> None:
    line = f'{{"id": "a", "input": {{{NUMBERS}}}}}'.encode()
    found = parse_line(read_object(line)).messages[0].text
    assert found == ('{"amount":18446744073709551616,"rate":1.10,"all":[1e5,0.30,-0.0,2E+3]}')
    assert said("b.json", f'[{{"row": {{{NUMBERS}}}}}, {{"row": 1.10}}]'.encode(), None) == [
        found,
        "1.10",
    ]


def test_parquet_has_whole_numbers_and_decimals_exact() -> None:
    table = pa.table(
        {
            "amount": pa.array([2**64 - 1], pa.uint64()),
            "rate": pa.array([decimal.Decimal("1.10")], pa.decimal128(5, 2)),
            "all": pa.array([[0.5]]),
        }
    )
    file = io.BytesIO()
    parquet.write_table(table, file)
    assert said("a.parquet", file.getvalue()) == ["Pay 18446744073709551615 at 1.10; [0.5]"]


def test_objects_of_a_program_have_whole_numbers_of_any_size() -> None:
    with open_input([{"amount": 10**40, "rate": 1.5, "all": []}]) as source:
        (line,) = source
    row = read_object(line.data or b"")
    assert RowRules().line_of(row, PROMPT).messages[0].text == f"Pay {10**40} at 1.5; []"


def test_metadata_have_plain_numbers() -> None:
    line = b'{"id": 18446744073709551616, "input": "a", "metadata": {"n": %d, "x": 1.10}}' % (2**64)
    found = parse_line(read_object(line))
    assert found.line_id == "18446744073709551616"
    assert found.metadata == {"n": 2**64, "x": 1.1}
    assert {type(one) for one in found.metadata.values()} == {int, float}


def test_what_a_row_keeps_can_be_stored() -> None:
    row = read_object(f'{{"id": "a", {NUMBERS}}}'.encode())
    kept = RowRules().line_of(row, PROMPT).metadata
    assert exact_json.loads(exact_json.dumps(kept)) == row
    assert kept["amount"] == 2**64


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("NaN", "NaN"),
        ("1e999", "too large"),
        ("9" * 4301, "4,301 digits"),
        ('"\\ud800"', "surrogate"),
    ],
)
@pytest.mark.parametrize("beside", ["1", "1.5"])
def test_what_json_does_not_have_is_refused_by_line(value: str, says: str, beside: str) -> None:
    with pytest.raises(ConfigurationError, match="is not valid JSON") as caught:
        read_object(f'{{"id": "a", "input": {value}, "x": {beside}}}'.encode())
    assert beside == "1" or says in caught.value.message


@pytest.mark.parametrize("value", [object(), 10**4300, "\ud800"], ids=["object", "digits", "half"])
def test_what_an_object_of_a_program_cannot_give_is_refused_by_its_number(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="line 2: is not valid JSON data"):
        open_input([{"input": "a"}, {"input": value}])
