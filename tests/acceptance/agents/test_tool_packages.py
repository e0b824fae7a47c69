"""Tools of installed packages, and middleware, on a real worker."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.workers.fleet_workers import FleetWorker
from support.workers.known_agents import until_known

from stepfleet.orchestrator import Fleet
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

Start = Callable[..., FleetWorker]
CALLS = ("model", "shout")
PLUGIN = '''
from stepfleet.orchestrator import tool

@tool(version="2.1")
def shout(text: str) -> str:
    """Say it louder."""
    return text.upper()
'''
AGENTS = """
import os
from pathlib import Path

from stepfleet.orchestrator import Agent
from stepfleet.orchestrator.continuation.error_policy import ErrorPolicy
from stepfleet.orchestrator.tools import Middleware

def note(text):
    with Path(os.environ["NOTES"]).open("a") as file:
        file.write(text + "\\n")

class Noting(Middleware):
    def __init__(self, name):
        self.name = name

    async def around_model(self, request, call_next):
        note(f"{self.name} model")
        return await call_next(request)

    async def around_tool(self, call, invocation, call_next):
        note(f"{self.name} {call.name}")
        return await call_next(call)

loud = Agent(
    "loud",
    model="openai:scripted",
    tools=["shout"],
    middleware=[Noting("first"), Noting("second")],
    error_policy=ErrorPolicy.ignore_tool_errors(),
)
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Install a package with a tool, as pip leaves it."""
    site = tmp_path / "site"
    info = site / "shouting-2.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shouting\nVersion: 2.1\n")
    (info / "entry_points.txt").write_text("[stepfleet.tools]\nshout = shouting_tools:shout\n")
    (site / "shouting_tools.py").write_text(PLUGIN)
    (tmp_path / "loud_agents.py").write_text(AGENTS)
    return site


def rules(request: RequestRecord) -> Reply:
    if request.turn > 1:
        return Reply("done", latency=0.01)
    calls = (ToolCallReply("shout", {"loudly": True}), ToolCallReply("shout", {"text": "hey"}))
    return Reply("", tool_calls=calls, latency=0.01)


def test_a_worker_finds_a_packages_tool_and_runs_it_through_the_agents_layers(
    installed: Path, tmp_path: Path, model: ModelServer, start_worker: Start, redis_url: str
) -> None:
    """TOOL-17, TOOL-19, TOOL-20, TOOL-22, TOOL-23: by its entry point; code is never sent."""
    model.follow(rules)
    notes = tmp_path / "notes"
    env = {
        "PYTHONPATH": str(installed),
        "STEPFLEET_AGENTS": str(tmp_path / "loud_agents.py"),
        "NOTES": str(notes),
    }
    start_worker(env=env)
    until_known(redis_url, "loud")
    with Fleet(redis_url) as fleet:
        run_id = fleet.submit("loud", "say hey")
        result = fleet.runs.wait(run_id, timeout=60)
        config = fleet.runs.show(run_id).config
        traces = fleet.history.tool_traces(run_id)
        cleared = fleet.history.clear_tool_traces(run_id), fleet.history.tool_traces(run_id).all()
    assert result.success
    refused, shouted = traces.all()
    assert (refused.call.is_error, shouted.call.result) == (True, "HEY")
    assert (traces.last(), traces.failed()) == (shouted, (refused,))
    assert traces.by_name("shout") == (refused, shouted)
    assert cleared == (2, ())
    assert [(one.name, one.version) for one in config.tools] == [("shout", "2.1")]
    model_call, tool_call = ([f"{name} {what}" for name in ("first", "second")] for what in CALLS)
    noted = notes.read_text().splitlines()
    assert noted == [*model_call, *tool_call, *tool_call, *model_call]
