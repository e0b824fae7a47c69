"""The benchmarks work and write what they say; how fast anything is, is not their test."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


def measured(folder: Path, name: str, *arguments: str) -> dict[str, Any]:
    """Run a benchmark; return its JSON file."""
    written = folder / "found.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments, "--json", str(written)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert max(map(len, done.stdout.splitlines())) <= 100
    found: dict[str, Any] = json.loads(written.read_text())
    assert found["benchmark"] == name
    assert found["machine"]["packages"]["celery"]
    return found


def rows(found: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    return [
        row for row in found["rows"] if all(row.get(key) == value for key, value in wanted.items())
    ]


@pytest.mark.long
def test_steps_are_measured_beside_a_chain_and_a_floor_and_drawn(tmp_path: Path) -> None:
    sizes = ("--slots", "3", "5", "--steps", "2", "--latency", "0.02", "--workers", "1")
    low = ("--low-runs", "2", "--low-steps", "3", "--plot", "found.svg")

    found = measured(tmp_path, "steps", *sizes, *low)

    for what in ("stepfleet", "floor", "celery chain"):
        assert [row["in_flight"] for row in rows(found, what=what)] == [3, 5]
        assert [row["steps"] for row in rows(found, what=what)] == [6, 10]
        assert all(row["rate"] > 0 and row["memory"] > 1e6 for row in rows(found, what=what))
    for row in rows(found, what="stepfleet"):
        assert row["over_ideal"] > 1
        assert row["scripts"] >= 2
        assert row["commands"] > row["round_trips"] > 0
    followed = rows(found, what="stepfleet run")
    assert [(row["in_flight"], row["steps"]) for row in followed] == [(3, 6), (5, 10)]
    assert all(row["scripts"] >= 2 and "command_ms" in row for row in followed)
    (low_load,) = rows(found, what="added")
    assert low_load["steps"] == 6
    assert low_load["turnaround_p99"] >= low_load["turnaround_p50"] > 0
    assert low_load["closing_p50"] > 0
    assert low_load["commands"]["script claim"] >= 1
    assert found["ratios"]["steps/s over the floor's (1 worker(s), 3 in flight, latency 0.02 s)"]
    assert "<svg" in (tmp_path / "found.svg").read_text()


@pytest.mark.long
def test_cost_is_measured_against_history_waiting_runs_and_workers(tmp_path: Path) -> None:
    found = measured(
        tmp_path,
        "scale",
        *("--history", "3", "--total", "6", "--in-flight", "2", "--waiting", "20"),
        *("--workers", "2", "--runs", "5", "--steps", "2"),
    )

    assert [row["size"] for row in rows(found, part="history", what="stepfleet")] == [3]
    assert [row["size"] for row in rows(found, part="history", what="floor")] == [3]
    assert [row["steps"] for row in rows(found, part="history", what="stepfleet")] == [6]
    assert [row["size"] for row in rows(found, part="waiting")] == [20]
    assert [row["size"] for row in rows(found, part="workers")] == [2]
    assert all(row["wall"] > 0 and row["steps"] > 0 for row in found["rows"])


@pytest.mark.long
def test_the_signal_for_autoscalers_is_shown_over_time(tmp_path: Path) -> None:
    """OPS-02: under a limit of two calls most runs are no work, and nothing is at the end."""
    load = ("--runs", "20", "--steps", "2", "--latency", "0.1", "--in-flight", "2")
    found = measured(tmp_path, "autoscaling", *load, "--workers", "1", "--every", "0.2")

    for scene in ("burst", "throttled"):
        assert rows(found, scene=scene)[-1]["work"] == rows(found, scene=scene)[-1]["wanted"] == 0
    assert max(row["limits"] for row in rows(found, scene="throttled")) > 0
    assert all(row["work"] <= 10 for row in rows(found, scene="throttled"))
    assert all(row["ms"] > 0 for row in found["rows"])


@pytest.mark.long
def test_simulated_workers_cost_redis_about_what_real_ones_do(tmp_path: Path) -> None:
    """Each message wakes each of them once; what they send is never refused."""
    found = measured(tmp_path, "capacity", "--quick")

    for what in ("idle", "woken"):
        real = {row["size"]: row for row in rows(found, part="idle", what=what)}
        crowds = rows(found, part="simulated", what=what)
        assert [row["size"] for row in crowds] == [2, 4]
        assert all(row["refused"] == 0 and row["connections"] == 9 * row["size"] for row in crowds)
        assert real[2]["cpu"] > 0
    for row in rows(found, part="simulated", what="woken"):
        assert row["taken"] > 0
        assert row["fetches"] < (row["size"] + 2) * (row["messages"] + 2)
    assert all(value >= 0 for value in found["details"]["costs"].values())
    assert len(found["details"]["tables"]) == 4


@pytest.mark.long
def test_submission_is_measured_through_library_and_command_line(tmp_path: Path) -> None:
    found = measured(tmp_path, "submit", "--lines", "5", "--repeat", "1")

    for what in ("floor", "library", "cli"):
        assert [row["lines"] for row in rows(found, what=what)] == [5]
        assert all(row["rate"] > 0 for row in rows(found, what=what))
    assert all(row["megabytes"] > 10 for row in rows(found, what="library"))
    assert all(row["megabytes"] > 10 for row in rows(found, what="cli"))
    assert found["ratios"]["runs/s, library over the floor's, 5 lines"]["count"] == 1


@pytest.mark.long
def test_memory_of_ended_runs_is_measured_by_kind_of_key(tmp_path: Path) -> None:
    found = measured(tmp_path, "memory", "--steps", "3", "--runs", "4", "--stub")

    for agent in ("runner", "reader"):
        (row,) = rows(found, agent=agent)
        parts = [row[part] for part in ("header", "log", "outcomes", "events", "journal", "lost")]
        assert row["bytes"] == pytest.approx(sum(parts))
        assert all(row[name] > 0 for name in ("header", "log", "outcomes", "events"))
        assert row["read_ms"] > 0
    assert rows(found, agent="reader")[0]["log"] > rows(found, agent="runner")[0]["log"]


@pytest.mark.long
def test_a_workers_start_is_measured_beside_a_stock_one(tmp_path: Path) -> None:
    found = measured(tmp_path, "startup", "--top", "3")

    for what in ("stepfleet", "celery"):
        (row,) = rows(found, what=what)
        assert 0 < row["first_claim"] <= row["first_done"]
        assert row["ready"] > 0
        assert found["details"][what]["import_seconds"] > 0
    assert "stepfleet" in found["details"]["stepfleet"]["packages"]


def test_requests_to_a_batch_are_measured(tmp_path: Path) -> None:
    found = measured(tmp_path, "control", "--runs", "120")

    reached = {row["verb"]: row["reached"] for row in found["rows"]}
    assert reached == {"pause": 120, "resume": 120, "cancel": 120, "retry": 120}
    assert all(row["cpu"] > 0 for row in found["rows"])


def test_the_longest_call_of_each_script_is_measured(tmp_path: Path) -> None:
    sizes = ("--steps", "20", "--state", "100", "--calls", "5", "--active", "300", "--tries", "1")

    found = measured(tmp_path, "scripts", *sizes)

    names = {row["script"] for row in found["rows"]}
    assert {"rescue", "feed", "claim", "commit, trims", "adopt", "retry", "cancel"} <= names
    assert all(row["longest_ms"] > 0 for row in found["rows"])


@pytest.mark.long
def test_calls_of_every_provider_are_measured_beside_their_sdks(tmp_path: Path) -> None:
    found = measured(tmp_path, "providers", "--calls", "3", "--pairs", "1")

    measured_ones = {(row["provider"], row["answer"]) for row in found["rows"]}
    assert len(measured_ones) == 10
    assert all(row["ours_ms"] > 0 < row["sdk_ms"] for row in found["rows"])


@pytest.mark.long
def test_a_map_reduce_is_measured_beside_a_plain_batch(tmp_path: Path) -> None:
    sizes = ("--runs", "30", "--page", "6", "--workers", "1", "--latency", "0.05")

    found = measured(tmp_path, "graphs", *sizes)

    assert {row["what"]: row["steps"] for row in found["rows"]} == {"plain": 36, "map-reduce": 36}
    assert all(row["over_ideal"] > 1 for row in found["rows"])
    (graph,) = rows(found, what="map-reduce")
    assert 0 < graph["gap"] < graph["wall"]


@pytest.mark.long
def test_calls_that_wait_for_people_are_measured_beside_an_idle_fleet(tmp_path: Path) -> None:
    found = measured(tmp_path, "approvals", "--runs", "30", "--seconds", "2")

    (idle,), (waiting,) = rows(found, what="idle"), rows(found, what="waiting")
    assert all(one["worker_ms"] > 0 and one["commands"] > 0 for one in (idle, waiting))
    assert waiting["kb_per_run"] > 1
    (decided,) = rows(found, what="decided")
    assert decided["done"] >= decided["decide"] > 0
