"""The samples of the page on checkpoints run as they stand."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Fleet, RunComparison, SlimSerializationConfig
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

PAGE = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
AGENTS = '''\
from stepfleet.orchestrator import Agent, tool


@tool(read_only=True)
def look(what: str) -> str:
    """Look something up."""
    return f"seen {what}"


solver = Agent("solver", model="openai:scripted", instructions="Be brief.", tools=[look])
'''


def brief(request: RequestRecord) -> Reply:
    """Look twice; answer in one word where that is asked for."""
    if "one word" in request.messages[0]["content"]:
        return Reply("Yes.")
    if request.turn < 3:
        return Reply("looking", tool_calls=(ToolCallReply("look", {"what": str(request.turn)}),))
    return Reply("It is so.")


def test_the_samples_run_one_after_another(
    tmp_path: Path,
    redis_url: str,
    model: ModelServer,
    start_worker: Callable[..., FleetWorker],
) -> None:
    """DOC-05"""
    agents = tmp_path / "agents.py"
    agents.write_text(AGENTS, encoding="utf-8")
    model.follow(brief)
    start_worker(env={"STEPFLEET_AGENTS": str(agents)})
    solver = load_agents(str(agents))["solver"]
    with Fleet(redis_url) as fleet:
        run_id = fleet.submit(solver, "Is it so?")
        assert fleet.runs.wait(run_id, timeout=60).output == "It is so."
    samples = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    program = "\n".join([f"run_id, new_id = {run_id!r}, {str(uuid4())!r}", *samples])
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "STEPFLEET_REDIS_URL": redis_url},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    tokens, *said = done.stdout.splitlines()
    assert re.fullmatch(r"completed 3 \d+", tokens)
    assert said == ["It is so.", "1 1", "It is so.", "2", "fork", "2 -1 False", "True result"]


def test_the_presets_are_reported_as_they_are() -> None:
    """SER-02"""
    told = {
        cells[0]: cells[1:]
        for row in re.findall(r"^\| `(\w+)`(?: \(characters\))? \| (.+) \|$", PAGE, re.MULTILINE)
        if len(cells := [row[0], *row[1].split(" | ")]) == 4
    }
    presets = [
        SlimSerializationConfig.minimal(),
        SlimSerializationConfig.standard(),
        SlimSerializationConfig.full(),
    ]
    words = {True: "yes", False: "no"}
    assert told == {
        name: [
            words[value] if isinstance(value := getattr(one, name), bool) else str(value)
            for one in presets
        ]
        for name in SlimSerializationConfig.model_fields
    }
    assert {"first_differing_step", "settings"} <= RunComparison.model_fields.keys()
