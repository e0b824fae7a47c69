import csv
import io
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stepfleet.orchestrator import AgentRunResult, ConfigurationError, Lifecycle, StopReason
from stepfleet.orchestrator.batches.files import tables as module
from stepfleet.orchestrator.batches.files.tables import ResultTable, select
from stepfleet.orchestrator.records.run.results import run_status

BEGAN = datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)


def result(number: int, structured: Any = None, **fields: Any) -> AgentRunResult:
    reason = StopReason.ERROR if "error" in fields else StopReason.COMPLETED
    values = {"output": f"answer {number}", "cost_usd": 0.25, **fields}
    return AgentRunResult(
        run_id=f"r{number}",
        line_id=f"q-{number}",
        agent_name="clerk",
        lifecycle=Lifecycle.FAILED if "error" in fields else Lifecycle.COMPLETED,
        stop_reason=reason,
        status=run_status(reason),
        structured=structured,
        start_time=BEGAN,
        end_time=BEGAN + timedelta(seconds=1.5),
        max_iterations=10,
        **values,
    )


OPEN: list[ResultTable] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


def table_of(
    *structured: Any, fields: str | None = "id,structured.*", schema: dict[str, Any] | None = None
) -> ResultTable:
    table = ResultTable(select(fields))
    OPEN.append(table)
    for number, one in enumerate(structured):
        table.add(result(number, one), schema)
    return table


def as_csv(table: ResultTable) -> list[list[str]]:
    file = io.BytesIO()
    table.write_csv(file)
    return list(csv.reader(io.StringIO(file.getvalue().decode(), newline="")))


def test_parts_of_the_answer_are_columns_with_the_type_of_their_values() -> None:
    table = table_of(
        {"sku": "a", "price": 3, "tags": ["x"], "size": {"w": 1}, "ok": True},
        {"sku": "b", "price": 2.5, "tags": [], "size": {"h": 2.5}, "ok": None},
        None,
    )
    found = table.to_arrow()
    assert found.schema.field("structured.price").type == pa.float64()
    assert found.schema.field("structured.ok").type == pa.bool_()
    assert found.schema.field("structured.tags").type == pa.list_(pa.string())
    assert found["structured.size"].to_pylist()[:2] == [{"w": 1, "h": None}, {"w": None, "h": 2.5}]
    assert found["structured.price"].to_pylist() == [3.0, 2.5, None]


def test_the_columns_are_those_of_the_schema_even_if_no_row_has_them() -> None:
    schema = {
        "sku": {"type": "string"},
        "price": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "count": {"type": "integer"},
    }
    found = table_of({"price": 3, "more": 1}, None, schema=schema).to_arrow()
    names = [f"structured.{name}" for name in ("sku", "price", "count", "more")]
    assert found.column_names == ["id", *names]
    types = [found.schema.field(name).type for name in names]
    assert types == [pa.string(), pa.float64(), pa.int64(), pa.int64()]


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        (["a", 1], ["a", "1"]),
        ([True, 2], ["true", "2"]),
        ([2**70, 1], [str(2**70), "1"]),
        ([{"a": 1}, {"a": "x"}], ['{"a":1}', '{"a":"x"}']),
        ([{}, {}], ["{}", "{}"]),
        ([[1], 2], ["[1]", "2"]),
        ([2**60 + 1, 0.5], [str(2**60 + 1), "0.5"]),
    ],
)
@pytest.mark.parametrize("rows_at_once", [1, 100])
def test_values_that_share_no_type_become_text(
    values: list[Any], texts: list[str], rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROWS_AT_ONCE", rows_at_once)
    found = table_of(*({"x": value} for value in values)).to_arrow()
    assert found["structured.x"].to_pylist() == texts


def test_data_that_is_no_object_is_one_column() -> None:
    assert table_of(["x"], ["y", "z"], None).to_arrow()["structured"].to_pylist() == [
        ["x"],
        ["y", "z"],
        None,
    ]


def test_a_key_for_each_row_is_no_thousand_columns() -> None:
    with pytest.raises(ConfigurationError, match="select 'structured' as one column"):
        table_of(*({f"key {number}": 1} for number in range(1100)))
    whole = table_of(*({f"k{number}": 1} for number in range(300)), fields="structured")
    assert whole.to_arrow().schema.field("structured").type == pa.string()


def test_times_are_timestamps_and_costs_are_floats(tmp_path: Path) -> None:
    table = table_of({"n": 1}, None, fields=None)
    with (tmp_path / "out.parquet").open("wb") as file:
        table.write_parquet(file)
    found = pq.read_table(tmp_path / "out.parquet")
    assert found.schema.field("end_time").type == pa.timestamp("us", "UTC")
    assert found["end_time"].to_pylist()[0] == BEGAN + timedelta(seconds=1.5)
    assert found["cost_usd"].to_pylist() == [0.25, 0.25]
    assert found["duration_seconds"].to_pylist() == [1.5, 1.5]


def test_a_frame_keeps_integers_beside_nulls() -> None:
    frame = table_of({"n": 2**53 + 1}, None, fields=None).to_pandas()
    assert frame["structured.n"][0] == 2**53 + 1
    assert frame["structured.n"].isna().tolist() == [False, True]
    assert frame["cost_usd"].dtype == "float64"
    assert frame["start_time"].dt.tz is not None


def test_a_large_table_is_written_in_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 10)
    monkeypatch.setattr(module, "IN_MEMORY", 1)
    table = table_of(*({"n": number} for number in range(95)))
    with (tmp_path / "out.parquet").open("wb") as file:
        table.write_parquet(file)
    assert pq.ParquetFile(tmp_path / "out.parquet").num_row_groups == 10
    assert pq.read_table(tmp_path / "out.parquet")["structured.n"].to_pylist() == list(range(95))


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ('=HYPERLINK("x")', '\'=HYPERLINK("x")'),
        ("+49 30", "'+49 30"),
        ("-1+1|cmd", "'-1+1|cmd"),
        ("@SUM(1)", "'@SUM(1)"),
        ("\t=1", "'\t=1"),
        ("-3", "-3"),
        ("+2.5e-3", "+2.5e-3"),
        ('a=b, "c"\nd 😀\x00', 'a=b, "c"\nd 😀\x00'),
        ("", ""),
    ],
)
def test_a_text_in_csv_is_no_formula(text: str, cell: str) -> None:
    assert as_csv(table_of({"x": text}, fields="structured.x")) == [["structured.x"], [cell]]


def test_csv_has_data_as_json_and_nothing_for_null() -> None:
    rows = as_csv(table_of({"a": -1.5, "b": [True], "c": None}, fields="structured.*,error"))
    assert rows == [
        ["structured.a", "structured.b", "structured.c", "error"],
        ["-1.5", "[true]", "", ""],
    ]


def test_an_empty_table_has_its_columns() -> None:
    table = table_of(fields="id,cost_usd,structured.*,structured.sku")
    assert table.to_arrow().schema == pa.schema(
        [("id", pa.string()), ("cost_usd", pa.float64()), ("structured.sku", pa.string())]
    )
    assert as_csv(table) == [["id", "cost_usd", "structured.sku"]]


def test_a_failed_row_has_its_error() -> None:
    with ResultTable(select("status,error,structured.*")) as table:
        table.add(result(1, error="the service does not know the key"))
        assert table.to_arrow().to_pylist() == [
            {"status": "error", "error": "the service does not know the key"}
        ]
