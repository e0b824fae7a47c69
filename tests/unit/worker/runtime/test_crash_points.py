"""Crash points end a process exactly where they are told to, and cost nothing otherwise."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stepfleet.worker.runtime.crash_points import POINTS, crash_points, unharmed

VISITS = """
import os, threading
from stepfleet.worker.runtime.crash_points import crash_points
written = threading.Event()
class SinceWritten(threading.Timer):
    def run(self):
        written.wait()
        super().run()
threading.Timer = SinceWritten
visit = crash_points(os.environ)
for number in range(1, 4):
    visit("after-claim")
    visit("during-call")
    print(number, flush=True)
written.set()
for thread in threading.enumerate()[1:]:
    thread.join()
print("alive", flush=True)
"""
"""Its timers run from when the numbers are written, however long a busy machine takes for that."""


def visited(**environment: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", VISITS], env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout.split()


def test_without_the_variable_a_point_is_nothing() -> None:
    assert crash_points({}) is unharmed
    assert visited() == (0, ["1", "2", "3", "alive"])


def test_the_process_ends_at_the_first_visit() -> None:
    assert visited(STEPFLEET_CRASH_AT="after-claim") == (-signal.SIGKILL, [])


def test_the_process_ends_at_the_visit_that_is_named() -> None:
    assert visited(STEPFLEET_CRASH_AT="after-claim:3") == (-signal.SIGKILL, ["1", "2"])


def test_a_point_of_a_duration_ends_the_process_in_the_midst_of_what_follows() -> None:
    code, numbers = visited(STEPFLEET_CRASH_AT="during-call:1")
    assert code == -signal.SIGKILL
    assert numbers == ["1", "2", "3"]


def test_where_the_mark_lies_nobody_is_ended_any_more(tmp_path: Path) -> None:
    mark = str(tmp_path / "mark")
    first = visited(STEPFLEET_CRASH_AT="after-claim:2", STEPFLEET_CRASH_ONCE=mark)
    second = visited(STEPFLEET_CRASH_AT="after-claim:2", STEPFLEET_CRASH_ONCE=mark)
    assert first == (-signal.SIGKILL, ["1"])
    assert second == (0, ["1", "2", "3", "alive"])


def test_another_signal_can_be_named() -> None:
    code, _ = visited(STEPFLEET_CRASH_AT="after-claim", STEPFLEET_CRASH_BY="SIGTERM")
    assert code == -signal.SIGTERM


def test_an_unknown_point_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match="not a crash point; use message-popped, "):
        crash_points({"STEPFLEET_CRASH_AT": "after-clam"})
    assert len(set(POINTS)) == len(POINTS)
