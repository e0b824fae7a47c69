"""Agents that a file describes, on a real worker, with the environment over it."""

from collections.abc import Callable
from pathlib import Path

from support.workers.fleet_workers import FleetWorker
from support.workers.known_agents import until_known

from stepfleet.orchestrator import Fleet
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

FILE = """
[agents.adder]
model = "openai:scripted"
instructions = "From the file."
tools = ["stepfleet.orchestrator.tools.builtin:calculator"]
error_policy = "retry_tool_errors"

[agents.adder.settings]
temperature = 0.2
max_tokens = 300
seed = 5
"""


def test_file_environment_and_run_reach_the_model_in_their_order(
    redis_url: str,
    model: ModelServer,
    start_worker: Callable[..., FleetWorker],
    tmp_path: Path,
) -> None:
    """CONF-02, CONF-05, CONF-06: the key and the address too come from the environment."""
    seen: list[RequestRecord] = []

    def answers(request: RequestRecord) -> Reply:
        seen.append(request)
        if request.turn > 1:
            return Reply("It is 3.")
        return Reply("", tool_calls=(ToolCallReply("calculator", {"expression": "1 + 2"}),))

    model.follow(answers)
    file = tmp_path / "agents.toml"
    file.write_text(FILE)
    env = {
        "STEPFLEET_AGENTS": str(file),
        "STEPFLEET_AGENT__ADDER__SETTINGS__TEMPERATURE": "0.7",
        "STEPFLEET_AGENT__ADDER__MAX_STEPS": "4",
    }
    start_worker(env=env)
    until_known(redis_url, "adder")
    with Fleet(redis_url) as fleet:
        run_id = fleet.submit("adder", "1 + 2?", settings={"seed": 6})
        result = fleet.runs.wait(run_id, timeout=60)
    assert (result.output, result.max_iterations) == ("It is 3.", 4)
    assert result.tool_calls_by_name == {"calculator": 1}
    body = seen[0].body
    assert (body["temperature"], body["seed"]) == (0.7, 6)
    assert 300 in (body.get("max_tokens"), body.get("max_completion_tokens"))
    assert body["messages"][0]["content"] == "From the file."
