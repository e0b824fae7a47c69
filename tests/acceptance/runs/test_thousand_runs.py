"""A thousand independent runs on four workers, with a provider that refuses some requests."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Fleet
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import FaultKind, Faults, Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

Start = Callable[..., FleetWorker]
AGENT = load_agents(str(Path(__file__).parents[1] / "agent_modules" / "agents.py"))["plain"]
RUNS = 1000
NAMES = [f"run-{number:04d}" for number in range(RUNS)]


def named(text: str) -> set[str]:
    return set(re.findall(r"run-\d{4}", text))


def rules(request: RequestRecord) -> Reply:
    """Look the run's own name up, and answer with what was seen."""
    if request.turn == 1:
        call = ToolCallReply("look", {"what": request.question})
        return Reply(tool_calls=(call,), latency=0.2)
    return Reply(f"answer: {request.answers[-1].content}", latency=0.2)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_thousand_runs_complete_on_four_workers_and_know_nothing_of_each_other(
    model: ModelServer, start_worker: Start, redis_url: str
) -> None:
    """MULTI-05, QUAL-07: with a provider whose limit they exceed now and then."""
    model.follow(rules)
    limited: dict[FaultKind | str, float] = {FaultKind.RATE_LIMITED: 1.0}
    model._service.faults = Faults(rate=0.05, kinds=limited, first_attempts=2, retry_after=0.2)
    for number in range(4):
        start_worker(name=f"w{number}", env={"STEPFLEET_SLOTS": "100"})
    with Fleet(redis_url) as fleet:
        given = [{"id": name, "input": name} for name in NAMES]
        results = {one.line_id: one for one in fleet.submit_batch(given, agent=AGENT).results()}
    assert sorted(map(str, results)) == NAMES
    for name, result in results.items():
        assert result.output == f"answer: seen {name}", result.error
        assert named(result.to_json()) == {name}
    workers = {step.worker for result in results.values() for step in result.steps}
    assert len(workers) == 4
    for request in model.requests:
        assert named(json.dumps(request.body)) == {request.question}
    assert any(one.lost_attempts for one in results.values())
