"""A loaded fleet shrinks to no worker and comes back, with real workers and keepers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[3] / "benchmarks" / "shrinking.py"
LOAD = ("--runs", "60", "--steps", "3", "--latency", "1", "--slots", "80")
LIMITS = ("--in-flight", "10", "--then-in-flight", "80")
SCENE = ("--workers", "2", "--worker-kills", "0", "--keeper-kills", "1", "--every", "0.5")
TIMES = ("--drain-at", "0", "--drain", "0.05", "--lease", "60")
WAITS = ("--empty", "1", "--wait", "6", "--overdue")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_lost_or_doubled_where_workers_go_and_come_back(tmp_path: Path) -> None:
    """OPS-03, OPS-04: workers go while calls are made; keepers, one of them killed, keep the rest.

    No lease ends meanwhile: what a stopped worker had goes on because it was handed back.
    """
    options = (*LOAD, *LIMITS, *SCENE, *TIMES, *WAITS, "--json", "found.json")
    command = (sys.executable, str(PROGRAM), *options)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [row] = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert row["completed"] == row["runs"] > 60
    assert row["calls"] - row["least"] == row["repeated"] <= row["bound"] == row["handed_back"] > 0
    assert row["timers"] >= 3
    said = {one["phase"]: one for one in row["phases"]}
    assert [one["workers"] for one in said.values()] == [0, 2, 0, 2, 2]
    assert 0 < said["no workers"]["work"] == said["no workers"]["queued"] <= 10
