"""What clients can rely on when a worker says that it is ready, and when it stops."""

import signal
from typing import Any

import pytest
from support.deadlines import wait_until

from stepfleet.orchestrator import Fleet
from stepfleet.worker.testing.scenario import Reply

LONG = 60.0


@pytest.mark.parametrize("options", [(), ("--pool=prefork", "-c1")], ids=["asyncio", "prefork"])
def test_a_ready_worker_has_announced_its_agents_and_a_stopping_one_says_so(
    fleet: Fleet, start_worker: Any, hold: Any, options: tuple[str, ...]
) -> None:
    reached, struck = hold(lambda _: Reply("done"), 1)
    worker = start_worker(options=options, env={"STEPFLEET_DRAIN": "30"})
    run_id = fleet.submit("plain", "x")
    (seen,) = fleet.overview().workers
    assert (seen.alive, seen.stopping, "plain" in seen.agents) == (True, False, True)
    assert reached.wait(LONG)
    worker.signal(signal.SIGTERM)
    wait_until(lambda: fleet.overview().workers[0].stopping, within=LONG, what="the drain")
    struck.set()
    assert fleet.runs.wait(run_id, LONG).output == "done"
    assert worker.wait() == 0
    assert fleet.overview().workers == ()
