"""Where a tool failed: in its record, in the worker's log, in `show --debug` and in Flower."""

from collections.abc import Callable
from pathlib import Path

import pytest
from celery import Celery
from support.deadlines import wait_until
from support.workers.command_line import CommandLine
from support.workers.fleet_workers import FleetWorker
from support.workers.toy_worker import Events

from stepfleet.orchestrator import Fleet
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

Start = Callable[..., FleetWorker]
FILE = Path(__file__).parents[1] / "agent_modules" / "failing_agents.py"
BROKEN = load_agents(str(FILE))["broken"]
TOOLS = ("on_a_thread", "in_the_loop", "on_its_queue")
LONG = 60.0


def calls_each(request: RequestRecord) -> Reply:
    """Call every tool, then answer."""
    if request.turn > 1:
        return Reply("they all failed")
    return Reply(tool_calls=tuple(ToolCallReply(name, {"what": "lamp"}) for name in TOOLS))


@pytest.mark.parametrize("pool", ["asyncio", pytest.param("prefork", marks=pytest.mark.long)])
def test_every_failing_tool_shows_where_it_failed(
    pool: str,
    model: ModelServer,
    start_worker: Start,
    redis_url: str,
    tmp_path: Path,
) -> None:
    """Threads, coroutines, queues of their own; the model reads the message alone."""
    model.follow(calls_each)
    options = ("-E", "-Q", "stepfleet,heavy", *(() if pool == "asyncio" else ("-P", pool)))
    with (
        Celery(broker=redis_url, set_as_current=False) as app,
        Events(app).listening() as events,
        Fleet(redis_url) as fleet,
    ):
        worker = start_worker(options=options, env={"STEPFLEET_AGENTS": str(FILE)})
        result = fleet.runs.wait(fleet.submit(BROKEN, "all of them"), timeout=LONG)
        wait_until(lambda: events.all("task-failed", 2), within=LONG, what="both tasks' ends")
    assert result.success
    for call in result.steps[0].tool_calls:
        assert call.error is not None
        where = call.error.traceback or ""
        assert where.startswith("Traceback (most recent call last):")
        assert f"in {call.tool_name}\n" in where
        assert where.endswith("LookupError: no lamp in the index")
        assert f"{where.splitlines()[-2]}\n" in worker.log
        assert "/orchestrator/" not in where
        assert "/worker/" not in where
    shown = CommandLine(tmp_path, STEPFLEET_REDIS_URL=redis_url)("show", result.run_id, "--debug")
    assert [name for name in TOOLS if f"in {name}\n" in shown.stdout] == list(TOOLS)
    said = "".join(str(request.body) for request in model.requests)
    assert "no lamp in the index" in said
    assert "Traceback" not in said
    for event in events.all("task-failed", 2):
        assert "failing_agents.py" in event["traceback"]
        assert "tasks.py" not in event["traceback"]
