"""What an answer from the response cache takes, beside a call of a model that is slow."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "caching.py"
MUCH = 10
"""The seed names 100 to 500; a test's machine has other work. docs/costs.md has the figures."""
A_HUNDRED = 100


@pytest.mark.timeout(420)
def test_a_hit_is_much_faster_than_a_call(tmp_path: Path) -> None:
    """CACHE-10: the benchmark, small and without a worker."""
    written = tmp_path / "found.json"
    sizes = ("--calls", "1", "--hits", "60", "--runs", "0", "--latency", "1")
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), *sizes, "--json", str(written)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert max(map(len, done.stdout.splitlines())) <= 100
    found = json.loads(written.read_text())
    made, cached = found["rows"]
    assert (made["count"], cached["count"]) == (1, 60)
    assert made["p50"] >= 1
    assert found["ratios"]["call: made over cached, medians"]["median"] > MUCH


@pytest.mark.long
@pytest.mark.timeout(420)
def test_a_hit_is_a_hundred_times_faster_than_a_call_of_500_ms(tmp_path: Path) -> None:
    """CACHE-10: the seed's lower bound, for a machine without much other work."""
    written = tmp_path / "found.json"
    sizes = ("--calls", "5", "--hits", "300", "--runs", "0", "--latency", "0.5")
    subprocess.run(
        [sys.executable, str(BENCHMARK), *sizes, "--json", str(written)],
        cwd=tmp_path,
        capture_output=True,
        timeout=400,
        check=True,
    )
    ratios = json.loads(written.read_text())["ratios"]
    assert ratios["call: made over cached, medians"]["median"] > A_HUNDRED
