"""Batches that follow each other on real workers, of which one is killed while it submits."""

import re
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from celery import Celery
from support.deadlines import wait_until
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Agent, Fleet
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply
from stepfleet.worker.testing.server import ModelServer

LONG = 60.0
ROOM = {"STEPFLEET_MAX_ACTIVE_RUNS": "4", "STEPFLEET_LEASE": "2"}
AGENTS = Path(__file__).parents[1] / "agent_modules"
AGENT = load_agents(str(AGENTS / "agents.py"))["plain"]
Start = Callable[..., FleetWorker]


def test_map_reduce_survives_the_death_of_the_worker_that_submits(
    fleet: Fleet, start_worker: Start, model: ModelServer
) -> None:
    """MULTI-01, MULTI-04: no run is lost, none is made twice, and the sum is right."""
    killed = threading.Event()

    def count(request: RequestRecord) -> Reply:
        if "Sum" not in request.question:
            return Reply("1")
        # The worker has created as many as may be active, and waits for their ends.
        killed.wait(LONG)
        return Reply(str(sum(map(int, re.findall(r'"output":"(\d+)"', request.question)))))

    model.follow(count)
    numbers = fleet.submit_batch([{"input": f"Number {n}"} for n in range(60)], agent=AGENT)
    total = numbers.then(AGENT, "Sum up: {outputs}", page=8, until_one=True)
    first = start_worker(name="w1", env=ROOM)
    between = wait_until(
        lambda: next((one for one in numbers.progress().next if one != total.id), None),
        within=LONG,
    )
    assert between is not None
    batch = fleet.batches.get(between)
    wait_until(lambda: batch.progress().in_progress == 4, within=LONG)
    assert batch.progress().waits
    first.end()
    killed.set()
    start_worker(name="w2", env=ROOM)
    assert [one.output for one in total.results()] == ["60"]
    progress = batch.wait(LONG)
    assert (progress.completed, progress.total, progress.sealed) == (8, 8, True)
    asked = Counter(request.question for request in model.requests)
    assert len(asked) == 60 + 8 + 1
    assert total.wait(LONG).ok


@pytest.mark.parametrize("pool", [(), ("-P", "prefork", "-c", "1")], ids=["asyncio", "prefork"])
def test_workers_are_told_of_a_batch_that_follows_an_ended_one(
    fleet: Fleet, start_worker: Start, redis_url: str, pool: tuple[str, ...]
) -> None:
    """MULTI-01: the worker looks only when it is told to, and none of its steps ends the batch."""
    agent = Agent("plain", model="openai:scripted")
    cancelled = fleet.submit_batch([{"input": f"Number {n}"} for n in range(3)], agent=agent)
    assert cancelled.cancel() == 3
    start_worker(options=pool, env={"STEPFLEET_AGENTS": str(AGENTS / "told_agents.py")})
    with Celery(broker=redis_url, set_as_current=False) as app:  # a ready worker may not listen yet
        wait_until(lambda: app.control.ping(timeout=1.0), within=LONG, what="an answer")
    following = cancelled.then(agent)
    refused = wait_until(lambda: following.progress().refused, within=LONG)
    assert refused is not None
    assert "was cancelled" in refused
