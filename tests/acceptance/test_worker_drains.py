"""What a worker does with messages that it has fetched and will not begin any more."""

import signal
from collections.abc import Callable

import pytest
from deadlines import wait_until
from fleet_workers import AGENTS, FleetWorker

from stepfleet.orchestrator import Fleet
from stepfleet.orchestrator.loading_agents import load_agents
from stepfleet.worker.testing import ModelServer, Reply, RequestRecord, ToolCallReply

PLAIN = load_agents(str(AGENTS))["plain"]


TURNS = 5


def busy(request: RequestRecord) -> Reply:
    """One tool call per turn, then an answer; no step takes long."""
    if request.turn < TURNS:
        return Reply(tool_calls=(ToolCallReply("look", {"what": str(request.turn)}),))
    return Reply("answer")


@pytest.mark.parametrize("pool", ["asyncio", pytest.param("threads", marks=pytest.mark.long)])
def test_a_busy_worker_that_is_stopped_puts_steps_back_without_a_traceback_for_each(
    pool: str, model: ModelServer, start_worker: Callable[..., FleetWorker], redis_url: str
) -> None:
    model.follow(busy)
    options = () if pool == "asyncio" else ("-P", pool, "-c", "8")
    leaver = start_worker(name="leaver", options=options)
    with Fleet(redis_url) as fleet:
        batch = fleet.submit_batch([{"input": f"question {n}"} for n in range(200)], agent=PLAIN)
        wait_until(lambda: batch.progress().steps >= 50, within=20)

        leaver.signal(signal.SIGTERM)

        assert leaver.wait(within=20) == 0
        assert batch.progress().open
        assert "Traceback" not in leaver.log
        assert "Reject" not in leaver.log
        start_worker(name="heir")
        assert {result.output for result in batch.results()} == {"answer"}
        assert batch.progress().steps == 200 * TURNS
