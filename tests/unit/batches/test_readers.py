"""Tables and arrays to lines: what files of users hold, with the numbers of the file."""

import datetime as dt
import decimal
import io
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
from pyarrow import parquet

from stepfleet.orchestrator import ConfigurationError
from stepfleet.orchestrator.batches.files.openai_format import RawLine
from stepfleet.orchestrator.batches.files.source import open_input

UTC_TIME = pa.timestamp("ns", "UTC")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def lines_of(name: str, data: bytes) -> list[RawLine]:
    Path(name).write_bytes(data)
    with open_input(name) as source:
        found = list(source)
        assert list(source) == found
    return found


def rows_of(name: str, data: bytes) -> list[tuple[int, Any]]:
    return [
        (one.number, one.problem or orjson.loads(one.data or b"")) for one in lines_of(name, data)
    ]


def test_csv_of_a_spreadsheet_keeps_its_texts_and_line_numbers() -> None:
    data = (
        b'\xef\xbb\xbfsku,text,\r\n1,"a ""q"",\r\nnext",x\r\n\r\n2,\xc3\xa9,\r\n3,b\r\n'
        b'4,"c"d,x\r\n5,,\r\n'
    )
    assert rows_of("a.csv", data) == [
        (2, {"sku": "1", "text": 'a "q",\r\nnext'}),
        (5, {"sku": "2", "text": "é"}),
        (6, "has 2 fields, and the header 3; quote commas in texts"),
        (7, """is not a row of CSV (',' expected after '"'); double the quotes inside quotes"""),
        (8, {"sku": "5", "text": ""}),
    ]
    assert [one.row for one in lines_of("a.csv", data)] == [0, 1, 2, 3, 4]


def test_semicolons_and_tabs_separate_too() -> None:
    assert rows_of("a.csv", b"a;b\n1,5;2\n") == [(2, {"a": "1,5", "b": "2"})]
    assert rows_of("a.TSV", b'a\tb\n1\t"x\ty"\n') == [(2, {"a": "1", "b": "x\ty"})]


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("a.csv", b"a,b,a\n", "a.csv: column 'a' appears twice"),
        ("a.csv", b",\n1,2\n", "the header names no column"),
        ("a.csv", b'a,b\n1,"x\n2,y\n', "line 2: is not valid CSV (unexpected end of data)"),
        ("a.csv", b"a,b\n1,2\n3,\xff\n", "line 3: is not UTF-8 (byte 3)"),
        ("a.csv", "a,b\n1,2\n".encode("utf-16"), "is in UTF-16; save it as UTF-8"),
        ("a.csv", b'a\n"' + b"x\n" * 2_200_000, "its row is longer than 4 MiB"),
        ("a.csv", b"a\n" + b"x" * 5_000_000, "its row is longer than 4 MiB"),
        ("a.xlsx", b"PK\x03\x04....", "save it as CSV"),
        ("a.csv", b"\x1f\x8b....", "compressed with gzip; unpack it first"),
        ("a.parquet", b"PAR1....", "not readable as Parquet"),
        ("a.json", b'[{"a": 1}, {"a": }]', "line 1: is not valid JSON (Expecting value)"),
        ("a.json", b'[{"a": 1}\n {"a": 1}]', "line 2: is not valid JSON ('{', expected ',')"),
        ("a.json", b'[{"a": 1}', "the end of the file, expected ','"),
        ("a.json", b"[1]\n[2]", "line 2: there is more after the array"),
        ("a.json", b"[" * 200_000, "nested too deep"),
        ("a.json", b'[\n"\xff"]', "line 2: is not UTF-8"),
        ("a.json", b'["' + b"x" * 9_000_000 + b'"', "longer than 4 MiB"),
    ],
)
def test_a_file_that_cannot_be_trusted_is_refused_with_its_line(
    name: str, data: bytes, why: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        lines_of(name, data)
    assert why in caught.value.message
    assert caught.value.message.startswith(f"{name}: ")


def test_an_array_gives_its_elements_at_their_lines_and_other_json_its_lines() -> None:
    data = b'\xef\xbb\xbf\n[ {"a": [1, "],"]},\n{"b":\n123456789012345678901234567890}\n, 3]\n'
    assert [(one.number, one.data) for one in lines_of("a.json", data)] == [
        (2, b'{"a": [1, "],"]}'),
        (3, b'{"b":\n123456789012345678901234567890}'),
        (5, b"3"),
    ]
    assert lines_of("a.json", b"[ ]") == []
    assert rows_of("b.json", b'{"a": 1}\n{"a": 2}\n') == [(1, {"a": 1}), (2, {"a": 2})]


def test_an_element_longer_than_what_is_read_at_once_comes_whole() -> None:
    long = "x" * 1_000_000
    data = orjson.dumps([{"a": long}, 12345, {"b": long}])
    assert [value for _, value in rows_of("a.json", data)] == [{"a": long}, 12345, {"b": long}]


def test_parquet_types_become_json() -> None:
    table = pa.table(
        {
            "id": [1, None],
            "when": pa.array([dt.datetime(2026, 1, 2, 3, tzinfo=dt.UTC), None], UTC_TIME),
            "day": [dt.date(2026, 1, 2), None],
            "took": pa.array([1500, None], pa.duration("ms")),
            "price": [decimal.Decimal("1.20"), None],
            "raw": [b"\xff\x00", None],
            "tags": [["a"], None],
            "item": [{"name": "x"}, None],
            "share": [float("nan"), None],
        }
    )
    parquet.write_table(table, "made.parquet")
    (first, second) = rows_of("a.parquet", Path("made.parquet").read_bytes())
    assert first == (
        1,
        {
            "id": 1,
            "when": "2026-01-02T03:00:00+00:00",
            "day": "2026-01-02",
            "took": 1.5,
            "price": "1.20",
            "raw": "/wA=",
            "tags": ["a"],
            "item": {"name": "x"},
            "share": None,
        },
    )
    assert second == (2, dict.fromkeys(first[1]))
    assert lines_of("a.parquet", Path("made.parquet").read_bytes())[0].unit == "row"


def test_parquet_without_pyarrow_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'stepfleet\[tables\]'"):
        lines_of("a.parquet", b"PAR1")


@pytest.mark.parametrize("kind", ["csv", "json", "parquet"])
def test_memory_does_not_grow_with_the_file(kind: str) -> None:
    rows = [{"sku": str(n), "text": "word " * 20} for n in range(60_000)]
    name = f"big.{kind}"
    if kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), name)
    elif kind == "json":
        Path(name).write_bytes(orjson.dumps(rows))
    else:
        Path(name).write_text(
            "sku,text\n" + "".join(f"{one['sku']},{one['text']}\n" for one in rows)
        )
    del rows
    with open_input(name) as source:
        tracemalloc.start()
        try:
            assert sum(1 for _ in source) == 60_000
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 3_000_000


def test_standard_input_has_the_format_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a,b\n1,2\n")))
    with open_input("-", "csv") as source:
        assert [one.data for one in source] == [b'{"a":"1","b":"2"}']


def test_values_of_databases_become_json_and_a_data_frame_names_the_fix() -> None:
    row = {"price": decimal.Decimal("1.5"), "on": dt.date(2026, 1, 2)}
    with open_input([row]) as source:
        assert [one.data for one in source] == [b'{"price":"1.5","on":"2026-01-02"}']
    with pytest.raises(ConfigurationError, match=r"df\.to_dict\('records'\)"):
        open_input(pa.table({"a": [1]}).to_pandas())
