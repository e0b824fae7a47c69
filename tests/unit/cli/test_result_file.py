from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import pytest

from stepfleet.orchestrator.batches import BatchFormat
from stepfleet.orchestrator.cli.result_file import Replacement, ResultFile, check_writable, is_empty
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.outcome import StopReason
from stepfleet.orchestrator.records.results import AgentRunResult, RunStatus
from stepfleet.orchestrator.records.state import Lifecycle


def result(run_id: str, line_id: str | None = None) -> AgentRunResult:
    return AgentRunResult(
        run_id=run_id,
        line_id=line_id,
        agent_name="solver",
        lifecycle=Lifecycle.COMPLETED,
        stop_reason=StopReason.COMPLETED,
        status=RunStatus.COMPLETED,
        output="42",
        start_time=datetime.now(UTC),
        end_time=datetime.now(UTC),
        max_iterations=10,
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def test_a_result_is_a_line_with_the_inputs_own_id(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(path, "stepfleet") as file:
        file.add(result("r1", "q-7"))

    (line,) = lines(path)
    assert (line["id"], line["run_id"], line["output"]) == ("q-7", "r1", "42")
    assert line["status"] == "completed"


def test_openai_batches_are_answered_in_their_own_format(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(path, "openai") as file:
        file.add(result("r1", "q-7"))

    (line,) = lines(path)
    assert line["custom_id"] == "q-7"
    assert line["response"]["body"]["choices"][0]["message"]["content"] == "42"


@pytest.mark.parametrize("kind", ["stepfleet", "openai"])
def test_what_is_there_already_is_kept_and_not_written_again(
    tmp_path: Path, kind: BatchFormat
) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(path, kind) as file:
        file.add(result("r1", "a"))
        file.add(result("r1", "a"))
    before = path.read_bytes()

    with ResultFile(path, kind) as file:
        assert file.count == 1
        file.add(result("r1", "a"))
        file.add(result("r2", "b"))

    assert path.read_bytes().startswith(before)
    assert len(lines(path)) == 2


def test_a_line_cut_off_by_a_crash_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(path, "stepfleet") as file:
        file.add(result("r1"))
        file.add(result("r2"))
    path.write_bytes(path.read_bytes()[:-20])

    with ResultFile(path, "stepfleet") as file:
        assert file.count == 1
        file.add(result("r2"))

    assert [line["run_id"] for line in lines(path)] == ["r1", "r2"]


def test_a_file_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary\n")

    with pytest.raises(ConfigurationError, match="line 1 is no result"):
        ResultFile(path, "stepfleet")

    assert path.read_text() == "dear diary\n"


def test_a_path_that_cannot_be_written_is_refused_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be written.*folder that exists"):
        check_writable(tmp_path / "nowhere" / "out.jsonl")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        check_writable(tmp_path)


def test_checking_leaves_no_file_behind(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"

    check_writable(path)

    assert is_empty(path)
    assert not path.exists()


def test_a_replacement_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("old\n")

    with Replacement(path, "stepfleet") as fresh:
        fresh.add(result("r1"))
        assert path.read_text() == "old\n"

    assert lines(path)[0]["run_id"] == "r1"
    assert [one.name for one in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_replacement_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("old\n")

    replacement = Replacement(path, "stepfleet")
    replacement.add(result("r1"))
    replacement.__exit__(RuntimeError, RuntimeError(), None)

    assert path.read_text() == "old\n"
    assert [one.name for one in tmp_path.iterdir()] == ["out.jsonl"]
