"""What a worker does with messages that it has fetched and will not begin any more."""

import signal
from collections.abc import Callable

import pytest
from support.deadlines import wait_until
from support.workers.busy_runs import NO_LIMITS, Busy
from support.workers.fleet_workers import AGENTS, FleetWorker

from stepfleet.orchestrator import Fleet
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.server import ModelServer

LONG = 60.0
PLAIN = load_agents(str(AGENTS))["plain"]


TURNS = 5
RUNS = 200


@pytest.mark.parametrize("pool", ["asyncio", pytest.param("threads", marks=pytest.mark.long)])
def test_a_busy_worker_that_is_stopped_puts_steps_back_without_a_traceback_for_each(
    pool: str, model: ModelServer, start_worker: Callable[..., FleetWorker], redis_url: str
) -> None:
    busy = Busy(turns=TURNS)
    model.follow(busy)
    options = () if pool == "asyncio" else ("-P", pool, "-c", "8")
    leaver = start_worker(name="leaver", options=options)
    with Fleet(redis_url) as fleet:
        given = [{"input": f"question {n}"} for n in range(RUNS)]
        batch = fleet.submit_batch(given, agent=PLAIN, **NO_LIMITS)
        wait_until(lambda: batch.progress().steps >= 50, within=LONG)

        leaver.signal(signal.SIGTERM)

        assert leaver.wait(within=LONG) == 0
        assert batch.progress().open == RUNS
        busy.struck.set()
        assert "Traceback" not in leaver.log
        assert "Reject" not in leaver.log
        start_worker(name="heir")
        results = list(batch.results())
        answers = {f"answer to question {n}" for n in range(RUNS)}
        assert {result.output for result in results} == answers
        assert batch.progress().steps == sum(len(result.steps) for result in results)
