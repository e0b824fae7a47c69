"""Files that are not what their name says: each message says what they are, and the fix."""

import datetime as dt
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
import zstandard
from pyarrow import feather, parquet

from stepfleet.orchestrator import ConfigurationError
from stepfleet.orchestrator.batches.files.lines import read_object
from stepfleet.orchestrator.batches.files.source import open_input


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def rows_of(name: str, data: bytes | None = None) -> list[Any]:
    """Return a file's objects, and problems as text."""
    if data is not None:
        Path(name).write_bytes(data)
    with open_input(name) as source:
        return [one.problem or orjson.loads(one.data or b"") for one in source]


LINE = b'{"input": "a"}\n'
PRETTY = b'{\n  "input": "a"\n}\n{\n  "input": "b"\n}\n'


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        ("a.csv", "id,input\n1,é\n".encode("utf-16"), "is in UTF-16; save it as UTF-8"),
        ("a.jsonl", LINE.decode().encode("utf-16-be"), "may be UTF-16"),
        ("a.json", LINE.decode().encode("utf-16-le"), "may be UTF-16"),
        ("a.csv", b"id,input\r1,a\r2,b\r", "ends its lines with CR alone; save it with LF"),
        ("a.jsonl", LINE.replace(b"\n", b"\r") * 2, "ends its lines with CR alone"),
        ("a.jsonl.zst", zstandard.compress(LINE), "compressed with Zstandard; unpack it first"),
        ("a.csv", zstandard.compress(LINE), "compressed with Zstandard"),
        ("a.jsonl.bz2", b"BZh91AY&SY", "compressed with bzip2"),
        ("a.jsonl.xz", b"\xfd7zXZ\0\0", "compressed with xz"),
        ("a.xls", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", r"Excel file .*\.xls.* save it as CSV"),
        ("a.csv", b"SQLite format 3\0", "database of SQLite; export"),
        ("a.jsonl", PRETTY, "spreads a JSON object over several lines; .*jq -c"),
        ("a.json", PRETTY, "spreads a JSON object over several lines"),
        ("a.jsonl", b'{"input": "a",\n "id": 1}\n', "spreads a JSON object over several lines"),
        ("a.jsonl", b'[{"id":"a","input":"x"},{"id":"b","input":"y"}]\n', r"JSON array; name it"),
        ("a.csv", b"id\tinput\n1\ta\n", r"tabs in its header and no comma; name it \.tsv, or say"),
        ("a.jsonl", b"\xef\xbb\xbf[\n" + LINE + b"]\n", r"JSON array; name it \.json, or say"),
    ],
)
def test_a_file_of_another_kind_is_named_with_the_fix(name: str, data: bytes, told: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{name}: .*{told}"):
        rows_of(name, data)


def test_tables_of_arrow_are_named_with_the_fix() -> None:
    table = pa.table({"input": ["a"]})
    feather.write_feather(table, "a.feather")
    with pa.OSFile("a.arrow", "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    with pa.OSFile("a.arrows", "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    for name in ("a.feather", "a.arrow", "a.arrows"):
        with pytest.raises(ConfigurationError, match=r"is an Arrow .* write it as Parquet"):
            rows_of(name)
    parquet.write_table(table, "a.jsonl")
    with pytest.raises(ConfigurationError, match=r"is a Parquet file; name it \.parquet"):
        rows_of("a.jsonl")


@pytest.mark.parametrize(
    "data",
    [
        b'{"input": "a",\n' + LINE,  # one bad line among good ones
        LINE.replace(b"\n", b"\r\n") * 2,
        LINE.rstrip() + b"\r",
        b"\n\n" + LINE,
    ],
)
def test_lines_that_only_look_odd_are_still_lines(data: bytes) -> None:
    Path("a.jsonl").write_bytes(data)
    with open_input("a.jsonl") as source:
        assert list(source)[-1].data == LINE.strip()


def test_columns_may_be_named_like_marks_of_other_formats() -> None:
    for name in ("PAR1", "ARROW1", "BZh", "ORCID", "sep"):
        assert rows_of("a.csv", f"{name},b\n1,2\n".encode()) == [{name: "1", "b": "2"}]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.csv", b"sep=;\nid;input\n1;a,b\n"),
        ("a.csv", b"\xef\xbb\xbfsep=|\r\nid|input\r\n1|a,b\r\n"),
        ("a.csv", b"sep=\t\nid\tinput\n1\ta,b\n"),
        ("a.tsv", b"sep=;\nid;input\n1;a,b\n"),
    ],
)
def test_the_separator_that_excel_writes_above_the_header_is_used(name: str, data: bytes) -> None:
    assert rows_of(name, data) == [{"id": "1", "input": "a,b"}]
    with open_input(name) as source:
        assert [one.number for one in source] == [3]


def test_a_row_of_empty_cells_says_so() -> None:
    (row, problem) = rows_of("a.csv", b"id,input\n1,a\n , \n")
    assert row == {"id": "1", "input": "a"}
    assert problem.startswith("has empty cells only; remove the row, or leave such rows out")


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_lacks_are_named(word: str) -> None:
    for text in (f'{{"input": "a", "metadata": {{"x": {word}}}}}', f'{{"a": [1, {word}]}}'):
        with pytest.raises(ConfigurationError, match=f"does not have {word}; write null"):
            read_object(text.encode())
    assert read_object(f'{{"input": "x: {word}}}"}}'.encode())["input"] == f"x: {word}}}"


def test_parquet_with_a_time_zone_that_is_not_known_names_it() -> None:
    column = pa.array([1], pa.timestamp("us", "Mars/Base"))
    parquet.write_table(pa.table({"input": ["a"], "when": column}), "a.parquet")
    with pytest.raises(ConfigurationError, match="time zone 'Mars/Base', which is not known here"):
        rows_of("a.parquet")


def test_parquet_keeps_all_digits_of_times_of_the_day() -> None:
    nanos = pa.time64("ns")
    columns = {
        "at": pa.array([1_234_567_891_234, None], nanos),
        "deep": pa.array([{"x": [1_234_567_891_234]}, None], pa.struct({"x": pa.list_(nanos)})),
        "micro": pa.array([1_234_567, None], pa.time64("us")),
    }
    parquet.write_table(pa.table(columns), "a.parquet")
    first, second = rows_of("a.parquet")
    assert first == {
        "at": "00:20:34.567891234",
        "deep": {"x": ["00:20:34.567891234"]},
        "micro": dt.time(0, 0, 1, 234_567).isoformat(),
    }
    assert second == dict.fromkeys(columns)
