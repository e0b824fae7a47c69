"""Answer contracts on real workers, whose own code knows nothing of the answer's type."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from support.deadlines import wait_until
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Agent, AgentRunResult, Fleet, RunStatus
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

LONG = 60.0
Start = Callable[..., FleetWorker]
Hold = Callable[..., tuple[threading.Event, threading.Event]]
KNOWN = load_agents(str(Path(__file__).parents[1] / "agent_modules" / "agents.py"))["plain"]


class Place(BaseModel):
    name: str


class City(BaseModel):
    """A type that only the client has."""

    people: int
    places: list[Place]


GOOD = {"people": 700_000, "places": [{"name": "harbour"}]}
BAD = {"people": "many", "places": [{"name": 1}]}


def city_agent(**config: Any) -> Agent:
    """Return the client's version of an agent that workers know without an answer's type."""
    return Agent(
        "plain",
        model="openai:scripted",
        instructions="Be brief.",
        tools=KNOWN.tools,
        output_type=City,
        **config,
    )


def asks(name: str, **arguments: Any) -> Reply:
    return Reply(tool_calls=(ToolCallReply(name, arguments),), latency=0.1)


SCRIPT = (
    asks("look", what="a map"),
    asks("final_answer", answer="Oslo"),
    asks("structured_response", structured=BAD),
    asks("structured_response", structured=GOOD),
)


def follow(request: RequestRecord) -> Reply:
    return SCRIPT[request.turn - 1]


def test_the_answer_of_one_worker_is_completed_by_another(
    fleet: Fleet, model: ModelServer, start_worker: Start, hold: Hold
) -> None:
    """ANS-18, ANS-14, ANS-08, ANS-09: text by the first, data checked by the second."""
    second, paused = hold(follow, 2)
    first = start_worker(name="w1")
    run_id = fleet.submit(city_agent(), "a city")
    assert second.wait(LONG), "nobody asked for the second turn"
    assert fleet.runs.pause(run_id).outcome == "requested"
    paused.set()
    wait_until(lambda: len(fleet.runs.show(run_id).log) == 2, within=LONG, what="the second step")
    first.signal(signal.SIGTERM)
    first.wait(within=LONG)
    noted = fleet.runs.show(run_id)
    assert noted.state.answer is not None
    assert (noted.state.answer.text, noted.state.answer.final) == ("Oslo", False)

    model.follow(follow)
    start_worker(name="w2")
    fleet.runs.resume(run_id)
    result = fleet.runs.wait(run_id, timeout=60)
    assert (result.status, result.output, result.structured) == (RunStatus.COMPLETED, "Oslo", GOOD)
    assert result.structured_as(City) == City.model_validate(GOOD)
    workers = [step.worker for step in result.steps]
    assert len(workers) == 4
    assert workers[0] == workers[1] != workers[2] == workers[3]
    wrong = result.steps[2].tool_calls[0].error
    assert wrong is not None
    assert "people: 'many' is not of type 'integer'" in wrong.message
    assert "places.0.name: 1 is not of type 'string'" in wrong.message


def test_two_workers_hold_fifty_runs_to_their_answers(
    fleet: Fleet, model: ModelServer, start_worker: Start
) -> None:
    """ANS-03, ANS-04, ANS-16, ANS-18: offers and instructions are alike on every worker."""
    model.follow(follow)
    slots = {"STEPFLEET_SLOTS": "5"}
    for name in ("w1", "w2"):
        start_worker(name=name, env=slots)
    results: list[AgentRunResult] = []

    def some_have_moved() -> bool:
        """Submit further ones where one worker was faster than all before."""
        first = len(results)
        lines = [{"id": f"r{n}", "input": f"city {n}"} for n in range(first, first + 50)]
        results.extend(fleet.submit_batch(lines, agent=city_agent()).results())
        assert len(results) == first + 50
        return any(len({step.worker for step in result.steps}) > 1 for result in results)

    wait_until(some_have_moved, within=LONG, what="a run that moved")
    for result in results:
        assert (result.status, result.output) == (RunStatus.COMPLETED, "Oslo")
        assert (result.structured, result.steps_used) == (GOOD, 4)
        spent = [step.usage.total_tokens for step in result.steps if step.usage]
        assert sum(spent) == result.usage.total_tokens > 0
    offered = {request.tools for request in model.requests}
    assert offered == {("look", "effect", "structured_response")}
    systems = {str(request.messages[0]["content"]) for request in model.requests}
    assert len(systems) == 1
    assert systems.pop().count("structured_response") == 1


def test_in_native_mode_the_provider_is_asked_for_the_schema_and_its_message_is_the_answer(
    fleet: Fleet, model: ModelServer, start_worker: Start
) -> None:
    """ANS-17, ANS-14"""
    said = '{"people": 700000, "places": [{"name": "harbour"}]}'
    model.follow(lambda request: Reply("a city" if request.turn == 1 else said))
    start_worker(name="w1")
    run_id = fleet.submit(city_agent(answer_mode="native"), "a native city")
    result = fleet.runs.wait(run_id, timeout=60)
    assert (result.status, result.structured, result.steps_used) == (
        RunStatus.COMPLETED,
        GOOD,
        2,
    )
    asked = model.requests[0].body["response_format"]
    assert asked["type"] == "json_schema"
    assert asked["json_schema"]["name"] == "City"
    assert asked["json_schema"]["schema"] == city_agent().config.output_schema
    assert model.requests[0].tools == ("look", "effect")
    assert "not valid JSON" in model.requests[1].messages[-1]["content"]
