"""A results file whose runs end anew: the newest line of each run stays, alone."""

import json
import signal
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest

from stepfleet.orchestrator import AgentRunResult, Lifecycle, RunStatus, StopReason
from stepfleet.orchestrator.cli.result_file import Kind, Layout, ResultFile, to_line

FULL = Layout("full")
ENDED = datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)
R1 = "3279d834-4597-5292-b65d-59e0a95115be"
R2 = "28bd622f-2ee0-5044-aaf4-1f5adc5c6f3a"


def result(
    run_id: str, line_id: str | None = None, *, output: str = "42", ended: datetime = ENDED
) -> AgentRunResult:
    return AgentRunResult(
        run_id=run_id,
        line_id=line_id,
        agent_name="solver",
        lifecycle=Lifecycle.COMPLETED,
        stop_reason=StopReason.COMPLETED,
        status=RunStatus.COMPLETED,
        output=output,
        start_time=ENDED,
        end_time=ended,
        max_iterations=10,
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


LATER = ENDED + timedelta(seconds=1)


@pytest.mark.parametrize("kind", ["full", "slim", "openai"])
def test_a_run_that_ended_anew_has_its_newest_line_alone(tmp_path: Path, kind: Kind) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(path, Layout(kind)) as file:
        file.add(result(R1, "a", output="old"))
        file.add(result(R2, "b"))
    path.chmod(0o640)

    with ResultFile(path, Layout(kind)) as file:
        assert file.ends == {R1: ENDED, R2: ENDED}
        file.add(result(R1, "a", output="new", ended=LATER))
        assert len(lines(path)) == 3  # nothing is lost by a crash

    second = to_line(result(R2, "b"), Layout(kind))
    newest = to_line(result(R1, "a", output="new", ended=LATER), Layout(kind))
    assert path.read_bytes() == second + newest
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [one.name for one in tmp_path.iterdir()] == ["out.jsonl"]


def test_nothing_is_rewritten_where_nothing_changed(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(path, FULL) as file:
        file.add(result(R1))
    before = path.stat().st_ino
    with ResultFile(path, FULL) as file:
        file.add(result(R1))
        file.settle([R1, R2])
    assert path.stat().st_ino == before


def test_a_settled_file_is_in_the_order_that_is_wanted(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(path, FULL) as file:
        for run_id in ("c", "foreign", "a", "b"):
            file.add(result(run_id))
        file.settle(["a", "b", "none", "c"])
        file.add(result("d"))
        file.add(result("a", ended=LATER))
    assert [line["run_id"] for line in lines(path)] == ["b", "c", "foreign", "d", "a"]


def test_a_file_of_another_form_is_written_anew_in_this_one(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(path, FULL) as file:
        file.add(result(R1))
        file.add(result(R2))
    with ResultFile(path, Layout("slim")) as file:
        assert file.ends == {R1: None, R2: None}
        file.add(result(R1))
    assert [("steps" in line) for line in lines(path)] == [True, False]


def test_a_line_of_an_earlier_version_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    old = {**result(R1).to_dict(), "outcome": {"shouldContinue": False}}
    path.write_bytes(orjson.dumps(old) + b"\n")
    with ResultFile(path, FULL) as file:
        file.add(result(R1))
    assert path.read_bytes() == to_line(result(R1), FULL)


KILLED = """
import os, sys
from pathlib import Path
from stepfleet.orchestrator.cli.result_file import Layout
from stepfleet.orchestrator.cli.result_file import ResultFile

file = ResultFile(Path(sys.argv[1]), Layout("full"))
os.fsync = lambda _: os.kill(os.getpid(), 9)  # behind the last line, before the new file's turn
file.settle()
"""


def test_a_kill_in_the_middle_of_a_rewrite_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    whole = to_line(result(R1), FULL) + to_line(result(R2), FULL)
    path.write_bytes(whole + to_line(result(R1, ended=LATER), FULL))
    before = path.read_bytes()

    ended = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False, timeout=60)

    assert ended.returncode == -signal.SIGKILL
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2
    with ResultFile(path, FULL) as file:
        assert len(file.ends) == 2
    assert [line["run_id"] for line in lines(path)] == [R2, R1]
    assert [one.name for one in tmp_path.iterdir()] == ["out.jsonl"]


def test_an_answer_that_no_json_library_likes_has_a_line(tmp_path: Path) -> None:
    odd = result(R1).model_copy(update={"structured": {"n": 10**30, "text": "\ud800"}})
    path = tmp_path / "out.jsonl"
    with ResultFile(path, FULL) as file:
        file.add(odd)
    with ResultFile(path, FULL) as file:
        assert file.ends == {R1: ENDED}
    assert json.loads(path.read_bytes())["structured"] == {"n": 10**30, "text": "?"}
