"""The signal for autoscalers with real workers: throttled, in hand, lost, and ended."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.deadlines import wait_until
from support.workers.command_line import CommandLine
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Fleet
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply
from stepfleet.worker.testing.server import ModelServer

Start = Callable[..., FleetWorker]
AGENT = load_agents(str(Path(__file__).parents[1] / "agent_modules" / "agents.py"))["plain"]
RUNS, ADMITTED, SLOTS = 40, 4, 8


def test_a_throttled_fleet_wants_what_its_limit_admits_until_all_has_ended(
    start_worker: Start, redis_url: str, commands: CommandLine
) -> None:
    """OPS-02: its workers hold four steps and 36 wait; killed, they are no capacity; then 0."""
    ends = threading.Event()

    def held(_: RequestRecord) -> Reply:
        return Reply("done") if ends.is_set() else Reply("never", latency=60.0)

    with ModelServer(held) as server, Fleet(redis_url) as fleet:
        limits = {"openai:scripted": {"in_flight": ADMITTED}}
        env = {"STEPFLEET_LIMITS": json.dumps(limits), "STEPFLEET_SLOTS": str(SLOTS)}
        env |= {"OPENAI_BASE_URL": server.url, "STEPFLEET_LEASE": "3"}
        worker = start_worker(name="first", env=env)
        rows = [{"id": f"{n}", "input": f"{n}"} for n in range(RUNS)]
        batch = fleet.submit_batch(rows, AGENT)
        wait_until(lambda: fleet.scale().in_hand == ADMITTED, within=60, what="steps in hand")
        wait_until(lambda: _state(fleet) == (ADMITTED, 1, {"limits": RUNS - ADMITTED}), within=60)
        found = fleet.scale(slots_per_worker=1)
        assert (found.in_hand, found.slots, found.workers, found.wanted) == (4, SLOTS, 1, ADMITTED)
        assert found.slots_per_worker == 1

        worker.signal(signal.SIGKILL)
        worker.wait()
        assert (fleet.scale().slots, fleet.scale().workers) == (0, 0)
        wait_until(lambda: fleet.scale().queued == ADMITTED, within=60, what="their leases' ends")
        assert _state(fleet) == (ADMITTED, 1, {"limits": RUNS - ADMITTED})

        ends.set()
        start_worker(name="second", env=env)
        assert len(list(batch.results())) == RUNS
        wait_until(lambda: _state(fleet) == (0, 0, {}), within=60, what="nothing to do")
    assert commands("scale", "--wanted", STEPFLEET_REDIS_URL=redis_url).stdout == "0\n"
    shown = json.loads(commands("scale", "--json", STEPFLEET_REDIS_URL=redis_url).stdout)
    assert (shown["work"], shown["wanted"], shown["slots"]) == (0, 0, SLOTS)
    said = commands("scale", STEPFLEET_REDIS_URL=redis_url).stdout
    assert said.startswith("0 workers wanted, 1 alive: 0 could go on now")
    wrong = commands("scale", "--slots-per-worker", "0", STEPFLEET_REDIS_URL=redis_url)
    assert (wrong.returncode, "--slots-per-worker" in wrong.stderr) == (2, True)


def _state(fleet: Fleet) -> tuple[int, int, dict[str, int]]:
    found = fleet.scale(slots_per_worker=SLOTS)
    return found.work, found.wanted, found.waits


UNITS = Path(__file__).parents[3] / "deploy" / "autoscaling" / "scale-units"


@pytest.mark.parametrize(
    ("port", "started"), [(None, [1, 2, 3]), ("1", None)], ids=["three", "without Redis"]
)
def test_units_are_started_and_stopped_as_wanted(
    redis_url: str, tmp_path: Path, port: str | None, started: list[int] | None
) -> None:
    """OPS-02: 5 queued steps for workers of 2 slots; where nothing is known all stays as it is.

    Six run: of the three that are not wanted only the last is stopped.
    """
    with Fleet(redis_url) as fleet:
        fleet.submit_batch([{"id": f"{n}", "input": "hello"} for n in range(5)], AGENT)
    calls = tmp_path / "calls"
    calls.touch()
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(
        f"#!/bin/sh\nif [ $2 = is-active ]; then [ ${{3#*@}} -le 6 ]; exit; fi\n"
        f'echo "$2 $3" >> {calls}\n'
    )
    systemctl.chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    url = f"redis://localhost:{port}/0" if port else redis_url
    told = {"PATH": path, "STEPFLEET_REDIS_URL": url, "STEPFLEET_SLOTS": "2"}
    done = subprocess.run([UNITS], env={**os.environ, **told}, cwd=tmp_path, check=False)
    assert (done.returncode == 0) == (started is not None)
    asked = [f"start stepfleet-worker@{n}" for n in started or ()]
    asked += ["stop stepfleet-worker@6"] if started else []
    assert calls.read_text().splitlines() == asked
