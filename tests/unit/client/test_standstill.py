"""What runs need and no living worker has."""

from typing import Any

import pytest

from stepfleet.orchestrator.client.watching.standstill import lacking
from stepfleet.orchestrator.store.fleet.overview import Need, WorkerSeen

STEP = Need(queue="steps", agent="solver")
TOOL = Need(queue="gpu", agent="solver")


def worker(*, alive: bool = True, **given: Any) -> WorkerSeen:
    fields = {"queues": ("steps",), "agents": ("solver",), **given}
    return WorkerSeen(name="w", seen_seconds_ago=0.0, alive=alive, **fields)


def test_nothing_is_lacking_where_a_worker_serves_the_queue_with_the_agent() -> None:
    assert lacking([worker()], "steps", [STEP]) == ""
    assert lacking([worker(queues=None)], "steps", [STEP, TOOL]) == ""
    assert lacking([worker(), worker(queues=("gpu",))], "steps", [STEP, TOOL]) == ""


@pytest.mark.parametrize("seen", [[], [worker(alive=False)]])
def test_without_a_living_worker_the_queue_of_steps_is_named(seen: list[WorkerSeen]) -> None:
    text = "no worker is alive for queue steps: stepfleet worker --agents MODULE"
    assert lacking(seen, "steps", ()) == text


def test_a_queue_of_tools_is_named_with_its_own_command() -> None:
    text = "no worker is alive for queue gpu: stepfleet worker --agents MODULE --queue gpu"
    assert lacking([worker()], "steps", [STEP, TOOL]) == text


def test_an_agent_that_the_workers_of_the_queue_lack_is_named() -> None:
    other = worker(agents=("other",))
    text = lacking([other, worker(queues=("gpu",))], "steps", [STEP])
    assert text.startswith("no worker that is alive has agent 'solver' (they have: other)")
    assert lacking([other], "steps", [STEP], exempt={"solver"}) == ""
