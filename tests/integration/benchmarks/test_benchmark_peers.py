"""The benchmark of peers: its own parts, on Stepfleet; the peers need environments of their own."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
RUNS, STEPS = 4, 2

pytestmark = pytest.mark.timeout(420)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of the benchmark by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def peers(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(BENCHMARKS / "peers.py"), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=400)


def test_a_measurement_tells_speed_processor_time_and_memory(tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    size = ("--concurrency", str(RUNS), "--steps", str(STEPS), "--latency", "0")

    answer = peers("--only", "stepfleet", *size, "--json", str(file))

    assert answer.returncode == 0, answer.stderr
    report = json.loads(file.read_text())
    (one,) = report["measured"]
    assert one["problem"] == ""
    assert one["calls"] == one["steps_done"] == RUNS * STEPS
    assert one["wall"] > 0
    assert one["rate"] == pytest.approx(RUNS * STEPS / one["wall"])
    assert one["peer_cpu_ms"] > 0
    assert one["memory"] > 10_000_000
    assert report["versions"]["stepfleet"]["celery"]
    assert report["rows"][0]["rate_ratio"] == 1
    assert "stepfleet" in answer.stdout


def test_a_peer_that_runs_out_of_time_is_reported_with_how_far_it_came(tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    size = ("--concurrency", "4", "--steps", "500", "--latency", "0.2")

    answer = peers("--only", "stepfleet", *size, "--deadline", "2", "--json", str(file))

    assert answer.returncode == 0, answer.stderr
    (one,) = json.loads(file.read_text())["measured"]
    assert one["problem"].startswith("did not finish within 2 s")
    assert one["steps_done"] < 4 * 500


def test_an_unknown_peer_is_refused_with_the_names_that_there_are() -> None:
    answer = peers("--only", "nothing")

    assert answer.returncode == 1
    assert "no peer 'nothing'; there are stepfleet, " in answer.stderr


def test_a_name_stands_for_its_variants_and_stepfleet_comes_along(module: Any) -> None:
    chosen = module("peers_catalog").chosen("dbos,restate+aiohttp")

    assert [peer.name for peer in chosen] == [
        "stepfleet",
        "dbos-sqlite",
        "dbos-sqlite+aiohttp",
        "dbos-postgres",
        "dbos-postgres+aiohttp",
        "restate+aiohttp",
    ]


def test_every_peer_has_a_script(module: Any) -> None:
    for peer in module("peers_catalog").PEERS:
        assert (BENCHMARKS / "peers" / peer.script).is_file(), peer.name


def test_above_a_concurrency_only_the_faster_client_of_a_peer_is_measured(module: Any) -> None:
    catalog = module("peers_catalog")

    kept = catalog.without_slower(catalog.chosen("celery,restate,restate+aiohttp"))

    assert [peer.name for peer in kept] == [
        "stepfleet",
        "celery-prefork",
        "celery-threads+urllib3",
        "celery-gevent+urllib3",
        "restate+aiohttp",
    ]


def test_in_pairs_stepfleet_is_measured_before_every_peer(module: Any) -> None:
    chosen = module("peers_catalog").chosen("dbos-sqlite,restate")

    order = [peer.name for peer in module("peers").order(chosen, pairs=True, repeat=2)]

    assert order == ["stepfleet", "dbos-sqlite", "stepfleet", "restate"] * 2


def test_ratios_are_to_stepfleet_in_the_same_setting(module: Any) -> None:
    figures = module("peers_measure").Figures
    setting = {"client": "own", "runs": 10, "steps": 1, "store_cpu_ms": 1.0, "steps_done": 10}
    measured = [
        figures("stepfleet", concurrency=1, latency=0, wall=1.0, peer_cpu_ms=1.0, **setting),
        figures("stepfleet", concurrency=1, latency=0, wall=3.0, peer_cpu_ms=3.0, **setting),
        figures("other", concurrency=1, latency=0, wall=10.0, peer_cpu_ms=5.0, **setting),
        figures("stepfleet", concurrency=9, latency=0, wall=9.0, peer_cpu_ms=9.0, **setting),
    ]

    other = next(row for row in module("peers_report").rows(measured) if row.peer == "other")

    assert other.rate_ratio == pytest.approx(1 / ((10 + 10 / 3) / 2))
    assert other.cpu_ratio == pytest.approx(6 / 3)


def test_processor_time_of_children_that_ended_is_counted(module: Any) -> None:
    child = "import time\nwhile time.process_time() < 1.5: pass"
    script = f"""
import subprocess, sys
input()
subprocess.run([sys.executable, '-c', {child!r}])
print('over', flush=True)
input()
"""
    command = [sys.executable, "-c", script]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        watch = module("peers_watch").Watch([process.pid], [])
        with watch:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
            assert process.stdout.readline() == b"over\n"
            spent = watch.spent()
        process.communicate(b"\n")

    assert 1.4 < spent.cpu < 4
    assert spent.store_cpu == 0
    assert spent.memory > 1_000_000
