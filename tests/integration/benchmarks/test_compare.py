"""`benchmarks/compare.py`: two trees measured in pairs, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.benchmarks import BENCHMARKS
from support.deadlines import wait_until

pytestmark = pytest.mark.timeout(240)

LONG = 200.0
TREE = "sf-compare-*/tree/uv.lock"
TINY = ("--pairs", "1", "--runs", "5", "--steps", "2", "--latency", "0")


def started(folder: Path, *arguments: str, **more: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(BENCHMARKS / "compare.py"), *arguments],
        env={**os.environ, "TMPDIR": str(folder), **more},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def git(*arguments: str) -> str:
    command = ["git", "-C", str(BENCHMARKS), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def has_history() -> bool:
    return bool(git("rev-parse", "--verify", "--quiet", "HEAD"))


def test_without_a_history_it_says_so_in_one_line(tmp_path: Path) -> None:
    running = started(tmp_path, "HEAD", GIT_DIR=str(tmp_path / "none"))
    _, told = running.communicate(timeout=LONG)

    assert running.returncode == 1
    (line,) = told.splitlines()
    assert line.startswith("compare.py: no commit HEAD here")


@pytest.mark.long
def test_this_tree_is_compared_with_its_last_commit(tmp_path: Path) -> None:
    running = started(tmp_path, "HEAD", *TINY, "--json", str(tmp_path / "found.json"))
    printed, told = running.communicate(timeout=LONG)

    if not has_history():
        assert "no commit HEAD here" in told
        return
    assert running.returncode == 0, told[-4000:]
    assert not list(tmp_path.glob("sf-*"))
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["side"] for row in rows] == ["old", "new"]
    for row in rows:
        assert row["worker, CPU ms per step"] > 0 < row["worker, max RSS MB"]
        assert row["script claim, calls/step"] >= 1 <= row["script commit, calls/step"]
        assert row["script claim, us/step"] > 0
    assert "new / old" in printed


@pytest.mark.long
def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    running = started(tmp_path, "HEAD", *TINY)
    if has_history():
        wait_until(lambda: list(tmp_path.glob(TREE)), within=LONG, what="a worktree")
        running.send_signal(signal.SIGINT)
    _, told = running.communicate(timeout=LONG)

    assert running.returncode != 0, told
    assert not list(tmp_path.glob("sf-*"))
    assert str(tmp_path) not in git("worktree", "list")
