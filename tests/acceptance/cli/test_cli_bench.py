"""`stepfleet bench`: a fleet of its own, measured and taken down again."""

from collections.abc import Iterator

import orjson
import pytest
from support.servers.redis_servers import short_folder
from support.workers.command_line import CommandLine

LONG = 60.0
SMALL = ("bench", "--runs", "20", "--steps", "3", "--latency", "0.05,tail=0.1:0.1")


@pytest.fixture
def stepfleet() -> Iterator[CommandLine]:
    with short_folder() as folder:
        commands = CommandLine(folder, STEPFLEET_LEASE="60")
        try:
            yield commands
        finally:
            commands.end()


def test_a_fleet_is_measured_without_key_or_agents_and_leaves_nothing_behind(
    stepfleet: CommandLine,
) -> None:
    done = stepfleet(*SMALL, "--tools", "0.5", "--concurrent", "5000", "--json", within=110)

    assert done.returncode == 0, done.stderr
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
    assert not list(stepfleet.folder.glob(".stepfleet*"))
    stepfleet.until_all_ended(within=LONG)


def test_people_get_tables_and_the_work_of_two_workers(stepfleet: CommandLine) -> None:
    done = stepfleet(*SMALL, "--workers", "2", "--faults", "0.05", within=110)

    assert done.returncode == 0, done.stderr
    assert "20 of 20" in done.stdout
    assert "2 x 1,000" in done.stdout
    assert "These estimates assume" in done.stdout


def test_a_latency_that_is_none_is_refused_before_anything_starts(stepfleet: CommandLine) -> None:
    done = stepfleet("bench", "--latency", "soon")

    assert done.returncode == 2
    assert "--latency soon" in done.stderr
    assert "Traceback" not in done.stderr
