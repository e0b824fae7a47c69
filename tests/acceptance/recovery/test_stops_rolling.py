"""All workers of a fleet replaced, one after another, while a batch runs."""

import signal
from collections import Counter
from collections.abc import Callable

import pytest
from support.deadlines import wait_until
from support.workers.busy_runs import NO_LIMITS, Busy
from support.workers.fleet_workers import AGENTS, FleetWorker

from stepfleet.orchestrator import Fleet
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.server import ModelServer

Start = Callable[..., FleetWorker]
PLAIN = load_agents(str(AGENTS))["plain"]
LATENCY = 0.5
WORKERS = ("w1", "w2", "w3")
LONG = 150.0
# Whatever had to wait for a lease would not end within the test.
ENV = {
    "STEPFLEET_LEASE": "600",
    "STEPFLEET_GRACE": "15",
    "STEPFLEET_DRAIN": "60",
}


@pytest.mark.parametrize(
    ("options", "runs"), [(("-c", "20"), 120), (("-P", "prefork", "-c", "6"), 36)]
)
def test_a_rolling_restart_repeats_no_step_and_leaves_no_run_waiting(
    options: tuple[str, ...], runs: int, model: ModelServer, start_worker: Start, redis_url: str
) -> None:
    """DIST-11, DIST-14: every model call is made once; nobody waits for a lease."""
    busy = Busy(latency=LATENCY)
    model.follow(busy)
    first = [start_worker(name=name, options=options, env=ENV) for name in WORKERS]
    with Fleet(redis_url) as fleet:
        given = [{"id": f"r{n}", "input": f"question {n}"} for n in range(runs)]
        batch = fleet.submit_batch(given, agent=PLAIN, **NO_LIMITS)
        wait_until(lambda: batch.progress().steps >= runs // 4, within=LONG, what="a busy fleet")

        for old in first:
            old.signal(signal.SIGTERM)
            assert old.wait(within=LONG) == 0
            start_worker(name=f"new-{old.name.partition('@')[0]}", options=options, env=ENV)
        assert batch.progress().open == runs
        busy.struck.set()

        wait_until(lambda: not batch.progress().open, within=LONG, what="the end of the batch")
        results = list(batch.results())
    assert len(results) == runs
    assert all(result.success for result in results)
    assert {len(result.lost_attempts) for result in results} == {0}
    calls = Counter((request.key, request.turn) for request in model.requests)
    assert len(calls) == sum(len(result.steps) for result in results)
    assert set(calls.values()) == {1}
    served = {step.worker for result in results for step in result.steps}
    assert len(served) >= len(WORKERS) + 1
