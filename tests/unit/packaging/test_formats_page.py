"""docs/formats.md says what result lines and tables are."""

import re
from pathlib import Path

import pyarrow as pa
import pytest
from support.documents.documents import first_code, pages, table

from stepfleet.orchestrator.batches.files.tables import (
    DEFAULT_FIELDS,
    MOST_COLUMNS,
    ROWS_AT_ONCE,
    arrow_types,
    kinds,
)
from stepfleet.orchestrator.cli.results import SLIM_COLUMNS, ResultOptions

PAGE = pages()["docs/formats.md"]


def test_every_field_of_a_result_has_its_type_and_meaning() -> None:
    rows = table(PAGE, "field", "type")
    assert [(first_code(name), kind) for name, kind, _ in rows] == list(kinds().items())
    assert all(meaning for *_, meaning in rows)


def test_the_columns_that_nobody_selected_are_those_of_the_page() -> None:
    told = re.search(r"Without `--fields`, a table has (.*?); with", PAGE, re.DOTALL)
    assert told
    assert re.findall(r"`([^`]+)`", told[1]) == list(DEFAULT_FIELDS)
    begin = DEFAULT_FIELDS[: DEFAULT_FIELDS.index("cost_usd") + 1]
    assert [*begin, "end_time"] == SLIM_COLUMNS.split(",")


def test_each_type_is_that_of_its_columns() -> None:
    told = {cells[0]: first_code(cells[1]) for cells in table(PAGE, "type above", "Arrow")[:5]}
    columns: dict[str, str] = {kind: name for name, kind in kinds().items() if name != "structured"}
    schema = arrow_types(list(columns.values()), {}, lambda: iter(()))
    assert told == {kind: str(schema.field(columns[kind]).type) for kind in told}
    assert schema.field(columns["data"]).type == pa.string()
    assert f"{ROWS_AT_ONCE:,} rows" in PAGE
    assert f"{MOST_COLUMNS:,} columns" in PAGE


@pytest.mark.parametrize("cells", table(PAGE, "`--out`", "`--format`"))
def test_a_file_is_written_as_the_page_says(cells: list[str]) -> None:
    ending, formats, _, written = cells
    named = re.match(r"`(\.\w+)`", ending)
    out = Path(f"out{named[1] if named else '.jsonl'}")
    for name in [*re.findall(r"`(\w+)`", formats), "auto"]:
        options = ResultOptions(
            out, name, "id" if "--fields" in ending else None, "--slim" in ending
        )
        options.check()
        layout = options.layout("openai" if "OpenAI" in ending else "stepfleet")
        assert layout.grows == written.startswith("line by line")
        assert (layout.kind == "openai") == ("OpenAI" in ending)
