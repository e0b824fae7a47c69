"""`benchmarks/bench.py`: a fleet of its own, measured and taken down again."""

import os
import subprocess
import sys
from pathlib import Path

import orjson
import psutil
import pytest
from support.benchmarks import BENCHMARKS
from support.deadlines import wait_until
from support.servers.redis_servers import short_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

LONG = 60.0
SMALL = ("--runs", "20", "--steps", "3", "--latency", "0.05,tail=0.1:0.1")


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark in a folder for its temporary files."""
    env = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "bench.py"), *arguments],
        env={**env, "TMPDIR": str(folder), "STEPFLEET_LEASE": "60", "COLUMNS": "200"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def left(folder: Path) -> list[psutil.Process]:
    return [one for one in psutil.process_iter(["cmdline", "cwd"]) if _is_of(one, str(folder))]


def _is_of(process: psutil.Process, folder: str) -> bool:
    places = [process.info["cwd"] or "", *(process.info["cmdline"] or ())]
    return any(folder in one for one in places)


def test_a_fleet_is_measured_without_key_or_agents_and_leaves_nothing_behind() -> None:
    with short_folder() as folder:
        done = bench(folder, *SMALL, "--tools", "0.5", "--concurrent", "5000", "--json")

        assert done.returncode == 0, done.stderr
        assert not list(folder.glob("stepfleet-bench-*"))
        wait_until(lambda: not left(folder), within=LONG, what="the end of all processes")
    told = orjson.loads(done.stdout)
    assert told["counts"] == {"runs": 20, "completed": 20, "steps": 60, "lost_attempts": 0}
    assert told["wall_seconds"] > told["ideal_seconds"] >= 0.15
    assert told["step_seconds"]["p50"] >= 0.05
    assert told["added_ms"]["p99"] >= told["added_ms"]["p50"] > 0
    assert told["worker_ms_per_step"] > 0
    assert told["bytes_per_worker"] > 10_000_000
    # Of 20 runs it may be 0: Redis's own buffers come and go by more than these take.
    assert 0 <= told["redis_bytes_per_run"] < 1_000_000
    (estimate,) = told["estimates"]
    assert estimate["concurrent"] == 5000
    assert estimate["workers"] >= 5
    assert told["assumptions"]


def test_people_get_tables_and_the_work_of_two_workers() -> None:
    with short_folder() as folder:
        done = bench(folder, *SMALL, "--workers", "2", "--faults", "0.05")

    assert done.returncode == 0, done.stderr
    assert "20 of 20" in done.stdout
    assert "2 x 1,000" in done.stdout
    assert "These estimates assume" in done.stdout


def test_a_latency_that_is_none_is_refused_before_anything_starts(tmp_path: Path) -> None:
    done = bench(tmp_path, "--latency", "soon")

    assert done.returncode == 2
    assert "--latency soon" in done.stderr
    assert "Traceback" not in done.stderr
