"""The processes that `run` and `up` start: real ones, ended, killed and started anew."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.deadlines import until, wait_until
from support.workers.ended import until_ended

from stepfleet.orchestrator import ConfigurationError
from stepfleet.orchestrator.cli.workers import Child, Supervisor, watched_argv

LONG = 60.0
LASTING = ("http.server", "--bind", "127.0.0.1", "0")
STARTER = """
import subprocess, sys, time
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def child_of(folder: Path, *module: str) -> Child:
    return Child("worker-1", watched_argv(*module), os.environ, folder / "worker-1.log")


async def test_a_worker_that_dies_is_started_anew_and_that_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    child = child_of(tmp_path, *LASTING)
    supervisor = Supervisor([child], said.append, drain=1.0)
    await supervisor.start()
    first = child.pid
    watching = asyncio.create_task(supervisor.watch())
    try:
        os.kill(first, signal.SIGKILL)

        async def started_anew() -> bool:
            return child.pid != first

        await until(started_anew, within=LONG, what="a new worker")
        assert "was killed by signal 9" in said[0]
        assert psutil.pid_exists(child.pid)
    finally:
        watching.cancel()
        await supervisor.stop()
    assert not psutil.pid_exists(child.pid)


async def test_a_worker_that_keeps_dying_is_given_up_with_the_end_of_its_log(
    tmp_path: Path,
) -> None:
    supervisor = Supervisor(
        [child_of(tmp_path, "no_such_module_at_all")], lambda _: None, drain=1.0
    )
    await supervisor.start()

    with pytest.raises(ExceptionGroup) as caught:
        await supervisor.watch()

    (error,) = caught.value.exceptions
    assert isinstance(error, ConfigurationError)
    assert "No module named no_such_module_at_all" in str(error)


async def test_stopping_is_bounded_for_a_worker_that_does_not_listen(tmp_path: Path) -> None:
    script = "import signal, threading; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    script += "print('deaf', flush=True); threading.Event().wait()\n"
    child = Child("deaf", [sys.executable, "-c", script], os.environ, tmp_path / "log")
    await child.start(answers=True)
    assert await child.first_line(within=LONG) == "deaf"

    await child.stop(within=0.2)

    assert not psutil.pid_exists(child.pid)


def test_a_leashed_process_ends_when_its_starter_is_killed() -> None:
    argv = watched_argv(*LASTING)
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, *argv], stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    with starter, starter.stdout:
        child = psutil.Process(int(starter.stdout.readline()))
        wait_until(child.net_connections, within=LONG, what="a listening child")

        starter.kill()

        until_ended(child, within=LONG)


def test_the_log_of_a_worker_is_its_owners_only(tmp_path: Path) -> None:
    async def start_and_stop() -> None:
        child = child_of(tmp_path, *LASTING)
        await child.start()
        await child.stop(within=5.0)

    asyncio.run(start_and_stop())

    assert (tmp_path / "worker-1.log").stat().st_mode & 0o077 == 0
