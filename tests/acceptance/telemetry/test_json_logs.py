"""Workers that log lines of JSON: a filter by run tells the whole run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.deadlines import wait_until
from support.workers.fleet_workers import FleetWorker
from support.workers.known_agents import until_known

from stepfleet.orchestrator import Fleet
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Fault, Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

LONG = 60.0
AGENT = Path(__file__).parents[1] / "agent_modules" / "logging_agent.py"


def answers(request: RequestRecord) -> Reply:
    if request.turn > 1:
        return Reply("Three lamps.")
    return Reply("Let me look.", tool_calls=(ToolCallReply("stock", {"product": "lamp"}),))


def lines(worker: FleetWorker) -> list[dict[str, Any]]:
    whole = worker.log.rpartition("\n")[0]  # the last line may still be being written
    return [json.loads(line) for line in whole.splitlines() if line.startswith('{"time"')]


@pytest.mark.parametrize("options", [(), ("--pool", "prefork", "--concurrency", "2")])
def test_a_filter_by_run_tells_the_whole_run(
    options: tuple[str, ...],
    redis_url: str,
    model: ModelServer,
    start_worker: Callable[..., FleetWorker],
) -> None:
    """OBS-04, OBS-09: its steps in order, what its tools wrote, its end, all with their ids."""
    model.follow(answers)
    env = {"STEPFLEET_AGENTS": str(AGENT), "STEPFLEET_LOG_FORMAT": "json"}
    worker = start_worker(options=options, env=env)
    until_known(redis_url, "clerk")
    with Fleet(redis_url) as fleet:
        ids = [fleet.submit("clerk", "How many lamps?") for _ in range(3)]
        for run_id in ids:
            assert fleet.runs.wait(run_id, timeout=60).success
    run_id = ids[1]

    def told() -> list[dict[str, Any]]:
        return [line for line in lines(worker) if line.get("run_id") == run_id]

    def of_steps() -> list[dict[str, Any]]:
        found = [line for line in told() if line["logger"] in ("stepfleet.steps", "warehouse")]
        # A child tells of a step behind its commit: another one may have told of the next by then.
        return sorted(found, key=lambda line: int(line["step"]))

    wait_until(lambda: len(of_steps()) >= 4, within=LONG, what="its end")
    written = of_steps()
    assert [(line["logger"], line["step"]) for line in written] == [
        ("warehouse", 1),
        ("stepfleet.steps", 1),
        ("stepfleet.steps", 2),
        ("stepfleet.steps", 2),
    ]
    assert written[0]["message"] == "looking for lamp"
    assert 'Action: stock {"product": "lamp"}; Observation: 3' in written[1]["message"]
    assert "FinalAnswer: Three lamps." in written[2]["message"]
    assert written[3]["message"] == f"clerk {run_id} ended after 2 steps: completed"
    assert {line["agent"] for line in written} == {"clerk"}
    tasks = {line["task_id"] for line in written}
    assert len(tasks) == 2
    received = [line for line in lines(worker) if "received" in line["message"]]
    assert tasks <= {line["task_id"] for line in received}
    assert {line["worker"] for line in received} == {worker.name}
    with Fleet(redis_url) as fleet:
        known = {one.name for one in fleet.overview().workers}
    assert {line["worker"] for line in written} <= known


def test_celerys_line_about_a_step_that_is_retried_has_the_ids_of_the_step(
    model: ModelServer, start_worker: Callable[..., FleetWorker], fleet: Fleet
) -> None:
    model.follow(answers)
    model.fail(Fault("server_error"), turn=1)
    env = {"STEPFLEET_AGENTS": str(AGENT), "STEPFLEET_LOG_FORMAT": "json"}
    worker = start_worker(env=env)
    run_id = fleet.submit("clerk", "How many lamps?")
    assert fleet.runs.wait(run_id, timeout=LONG).success

    def retried() -> list[dict[str, Any]]:
        return [line for line in lines(worker) if " retry: " in line["message"]]

    (line,) = wait_until(retried, within=LONG, what="the line")
    assert (line["run_id"], line["step"], line["agent"]) == (run_id, 1, "clerk")


def test_text_logs_tell_steps_to_who_asks_for_details(
    redis_url: str, model: ModelServer, start_worker: Callable[..., FleetWorker]
) -> None:
    """OBS-09: at the level DEBUG, a line per step."""
    model.follow(answers)
    worker = start_worker(options=("-l", "DEBUG"), env={"STEPFLEET_AGENTS": str(AGENT)})
    until_known(redis_url, "clerk")
    with Fleet(redis_url) as fleet:
        run_id = fleet.submit("clerk", "How many lamps?")
        assert fleet.runs.wait(run_id, timeout=60).success
    wait_until(lambda: f"clerk {run_id} ended after 2 steps" in worker.log, within=LONG, what="log")
    assert f"clerk {run_id} step 1: tool_execution (" in worker.log
    assert not lines(worker)
