"""A cancel of a run whose worker was killed, with no other worker up: the run ends all the same."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.runs.lapsed_leases import leases_run_out
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import AgentRunResult, Fleet, Lifecycle
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.scenario import Reply

AGENTS = load_agents(str(Path(__file__).parents[1] / "agent_modules" / "agents.py"))
LONG = 60.0
Hold = Callable[..., tuple[threading.Event, threading.Event]]
Start = Callable[..., FleetWorker]
Read = Callable[[Fleet, str], AgentRunResult]

READERS: dict[str, Read] = {
    "result": lambda fleet, run_id: fleet.runs.result(run_id),
    "show": lambda fleet, run_id: fleet.runs.show(run_id).result(),
    "wait": lambda fleet, run_id: fleet.runs.wait(run_id, timeout=LONG),
}


@pytest.fixture
def lost(redis_url: str, start_worker: Start, hold: Hold) -> str:
    """A run that is cancelled behind its worker's SIGKILL, within a lease of ten minutes."""
    reached, _ = hold(lambda _: Reply("late"), 0)
    worker = start_worker(env={"STEPFLEET_LEASE": "600"})
    with Fleet(redis_url) as fleet:
        run_id = fleet.submit(AGENTS["plain"], "question")
        assert reached.wait(LONG)
        worker.end()
        assert fleet.runs.cancel(run_id).outcome == "requested"
        assert not fleet.runs.result(run_id).lifecycle.is_terminal, "its lease has not run out"
    return run_id


@pytest.mark.parametrize("reader", READERS)
def test_who_reads_a_cancelled_run_behind_its_lease_finds_it_ended(
    redis_url: str, lost: str, reader: str
) -> None:
    leases_run_out(redis_url)
    with Fleet(redis_url) as fleet:
        result = READERS[reader](fleet, lost)
    assert result.lifecycle is Lifecycle.CANCELLED
    assert [(one.kind, one.ambiguous) for one in result.lost_attempts] == [("crash", True)]


def test_who_waits_already_when_the_lease_runs_out_sees_the_end(redis_url: str, lost: str) -> None:
    with Fleet(redis_url) as fleet, ThreadPoolExecutor() as threads:
        ends = threads.submit(lambda: list(fleet.runs.events(lost, follow=True)))
        waits = threads.submit(lambda: fleet.runs.wait(lost, timeout=LONG))
        leases_run_out(redis_url)
        assert waits.result(LONG).lifecycle is Lifecycle.CANCELLED
        assert ends.result(LONG)[-1]["payload"]["status"] == "cancelled"
