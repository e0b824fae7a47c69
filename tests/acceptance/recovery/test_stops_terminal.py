"""A worker whose terminal is closed drains as after Ctrl-C, and hands back what is not done."""

import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.deadlines import wait_until
from support.servers.redis_servers import RedisServer
from support.workers.command_line import COMMAND

from stepfleet.orchestrator import Agent, Fleet
from stepfleet.worker.testing.scenario import Reply
from stepfleet.worker.testing.server import ModelServer

LONG = 60.0
AGENTS = (
    "from stepfleet.orchestrator import Agent\nplain = Agent('plain', model='openai:scripted')\n"
)
ON_A_TERMINAL = (
    "import fcntl, os, sys, termios\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
)


def names(fleet: Fleet) -> set[str]:
    return {one.name for one in fleet.overview().workers}


@pytest.mark.parametrize("pool", ["asyncio", "prefork"])
def test_a_worker_whose_terminal_is_closed_hands_its_step_back(
    own_redis: Callable[..., RedisServer], model: ModelServer, tmp_path: Path, pool: str
) -> None:
    model.follow(lambda _: Reply("late", latency=600.0))
    (tmp_path / "agents.py").write_text(AGENTS)
    name = f"w1@{socket.gethostname()}"
    url = own_redis().url
    env = {
        **{one: os.environ[one] for one in ("PATH", "HOME") if one in os.environ},
        "STEPFLEET_REDIS_URL": url,
        "STEPFLEET_DRAIN": "0.2",
        "STEPFLEET_LEASE": "60",
        "OPENAI_BASE_URL": model.url,
        "OPENAI_API_KEY": "key",
    }
    command = [*COMMAND[1:], "worker", "-A", "agents.py", "-n", name, "-P", pool, "-c", "2"]
    terminal, its_end = pty.openpty()
    with (tmp_path / "log").open("w") as log, Fleet(url) as fleet:
        worker = subprocess.Popen(
            [sys.executable, "-c", ON_A_TERMINAL, *command],
            cwd=tmp_path,
            env=env,
            start_new_session=True,
            stdin=its_end,
            stdout=log,
            stderr=log,
        )
        os.close(its_end)
        try:
            run_id = fleet.submit(Agent("plain", model="openai:scripted"), "hello")
            wait_until(lambda: model.requests, within=LONG, what="the call")
            # One name everywhere; a child of a pool has its process id behind it.
            holder = fleet.runs.show(run_id).header["worker"]
            assert holder.split(":")[0] == name
            wait_until(lambda: holder in names(fleet), within=LONG, what="its first report")

            os.close(terminal)

            assert worker.wait(LONG) == 0, (tmp_path / "log").read_text()
            assert fleet.runs.show(run_id).header["token"] == ""
        finally:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()
