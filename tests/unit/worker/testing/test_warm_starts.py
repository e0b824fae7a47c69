"""A program that is started warm is what a cold start makes of it."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from support.deadlines import wait_until
from support.workers.command_line import COMMAND
from support.workers.warm_starts import CELERY, Forked, run, start

ENV = {"PATH": os.environ["PATH"], "COLUMNS": "100", "STEPFLEET_REDIS_URL": "redis://127.0.0.1:1"}
PRINTS = """
import atexit, os, sys
atexit.register(lambda: print("bye", flush=True))
print(os.environ["HERE"], os.getcwd(), sys.argv[1:], sys.path[0], sys.stdin.read(), flush=True)
from celery import Celery
app = Celery("tasks", broker="memory://")
"""
ZONE = """
import time
print("zone", time.strftime("%z"), flush=True)
from celery import Celery
app = Celery("tasks", broker="memory://")
"""


@pytest.mark.parametrize("arguments", [("--version",), ("--help",), ("nonsense",), ("status",)])
def test_a_warm_command_says_and_returns_what_a_cold_one_does(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    cold = subprocess.run(
        [*COMMAND, *arguments], env=ENV, cwd=tmp_path, capture_output=True, text=True, check=False
    )

    warm = run("stepfleet.orchestrator.cli", arguments, env=ENV, cwd=tmp_path)

    assert (warm.returncode, warm.stdout) == (cold.returncode, cold.stdout)
    assert warm.stderr == cold.stderr


def celery(folder: Path, *arguments: str) -> Forked:
    (folder / "tasks.py").write_text(PRINTS)
    (folder / "given").write_text("input")
    env = {"HERE": "its own", **ENV}
    log, given = folder / "log", folder / "given"
    return start(CELERY, arguments, env=env, cwd=folder, out=log, err=log, given=given)


def test_a_warm_program_has_its_own_environment_folder_files_and_end(tmp_path: Path) -> None:
    ended = celery(tmp_path, "-A", "tasks", "report")

    assert ended.wait(60) == 0
    first, *_, last = (tmp_path / "log").read_text().splitlines()
    arguments = ["-A", "tasks", "report"]
    assert first == f"its own {tmp_path} {arguments} {tmp_path} input"
    assert last == "bye"


def test_the_signal_that_ended_a_warm_program_is_reported(tmp_path: Path) -> None:
    worker = celery(tmp_path, "-A", "tasks", "worker", "-P", "solo")
    wait_until((tmp_path / "log").exists, within=60, what="the log")
    with pytest.raises(subprocess.TimeoutExpired):
        worker.wait(0.05)

    worker.send_signal(signal.SIGKILL)

    assert worker.wait(60) == -signal.SIGKILL
    assert worker.poll() == -signal.SIGKILL


@pytest.mark.parametrize(("zone", "offset"), [("Asia/Tokyo", "+0900"), ("UTC", "+0000")])
def test_a_warm_program_has_its_own_time_zone(tmp_path: Path, zone: str, offset: str) -> None:
    """EVT-18: else a worker that is started so never has another one."""
    (tmp_path / "tasks.py").write_text(ZONE)
    out, env = tmp_path / "log", {**ENV, "TZ": zone}
    ended = start(CELERY, ("-A", "tasks", "report"), env=env, cwd=tmp_path, out=out, err=out)

    assert ended.wait(60) == 0
    assert out.read_text().splitlines()[0] == f"zone {offset}"
