"""A loaded fleet goes from the version before to this one and back, with real old workers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.documents.stored_fields import STORED

ROOT = Path(__file__).parents[3]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_no_run_is_lost_and_no_effect_doubled_between_both_versions(tmp_path: Path) -> None:
    """OPS-04: in both directions; calls are repeated only where a worker was killed.

    Needs a clone whose history has the commit of `stored_fields.json`: else it fails.
    """
    commit = json.loads(STORED.read_text())["commit"]
    program = ROOT / "benchmarks" / "upgrade.py"
    options = ("--runs", "60", "--workers", "2", "--steps", "10", "--json", "found.json")
    command = (sys.executable, str(program), commit, *options)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [one["direction"] for one in rows] == ["old to new", "new to old"]
    assert all(one["right"] and one["in_hand"] for one in rows)
