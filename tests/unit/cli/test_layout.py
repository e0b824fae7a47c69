from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from stepfleet.orchestrator import ConfigurationError
from stepfleet.orchestrator.cli.result_file import Layout
from stepfleet.orchestrator.cli.results import ResultOptions
from stepfleet.orchestrator.records.batch import BatchFormat

JSONL, CSV, PARQUET = Path("out.jsonl"), Path("out.csv"), Path("out.parquet")


@pytest.mark.parametrize(
    ("options", "batch", "kind"),
    [
        (ResultOptions(), "stepfleet", "full"),
        (ResultOptions(), "openai", "openai"),
        (ResultOptions(JSONL, "jsonl"), "openai", "openai"),
        (ResultOptions(JSONL, "stepfleet"), "openai", "full"),
        (ResultOptions(JSONL, "openai"), "stepfleet", "openai"),
        (ResultOptions(slim=True), "openai", "slim"),
        (ResultOptions(fields="id"), "openai", "fields"),
        (ResultOptions(CSV), "openai", "csv"),
        (ResultOptions(Path("OUT.CSV")), "stepfleet", "csv"),
        (ResultOptions(PARQUET, slim=True), "stepfleet", "parquet"),
        (ResultOptions(Path("table.txt"), "csv"), "stepfleet", "csv"),
    ],
)
def test_results_have_the_form_of_their_file_and_else_of_their_batch(
    options: ResultOptions, batch: BatchFormat, kind: str
) -> None:
    options.check()
    assert options.layout(batch).kind == kind


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        (ResultOptions(slim=True, fields="id"), "leave one out"),
        (ResultOptions(fields="id", output_format="openai"), "leave out --fields and --slim"),
        (ResultOptions(CSV, "parquet"), "named as csv, --format says parquet"),
        (ResultOptions(CSV, "openai"), "named as csv, --format says openai"),
        (ResultOptions(output_format="parquet"), "name a file with --out"),
        (ResultOptions(Path("out.xlsx")), "as .csv or .parquet"),
        (
            ResultOptions(JSONL, fields="id,prize"),
            "a part of the answer's data is structured.prize",
        ),
    ],
)
def test_options_that_contradict_are_refused_with_the_fix(options: ResultOptions, fix: str) -> None:
    with pytest.raises(ConfigurationError, match=fix):
        options.check()


def test_only_lines_that_name_their_run_and_its_end_grow() -> None:
    grow = [kind for kind in ("full", "slim", "openai", "fields", "csv") if Layout(kind).grows]
    assert grow == ["full", "slim", "openai"]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, False),
        ({"slim": True}, False),
        ({"fields": "id"}, True),
        ({"output_format": "csv"}, True),
    ],
)
def test_a_file_of_somebody_is_no_place_for_a_whole_one(
    tmp_path: Path, options: dict[str, Any], kept: bool
) -> None:
    path = tmp_path / "out.txt"
    ResultOptions(path, **options).check_new()
    path.write_text("mine")
    checked = (
        pytest.raises(ConfigurationError, match="name another file") if kept else nullcontext()
    )
    with checked:
        ResultOptions(path, **options).check_new()
