"""What limits cost a fleet that has none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from redis import Redis

from stepfleet.orchestrator import AsyncFleet
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.worker.runtime.inline import InlineWorker
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

AGENT = load_agents(str(Path(__file__).parents[2] / "acceptance/agent_modules/agents.py"))["plain"]
RUNS, STEPS = 4, 4
POLL = "HGET sf:{limits}:settings version"
"""What each worker reads every other second, however many steps it does."""


def rules(request: RequestRecord) -> Reply:
    if request.turn < STEPS:
        return Reply(tool_calls=(ToolCallReply("look", {"what": "that"}),))
    return Reply("done")


async def test_a_step_sends_nothing_about_limits_where_there_are_none(
    redis_url: str, monkeypatch: Any
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with ModelServer(rules) as model:
        monkeypatch.setenv("OPENAI_BASE_URL", model.url)
        commands, steps = await commands_of_runs(redis_url)
    assert steps == RUNS * STEPS
    assert len(commands) > 20 * steps, "it saw the steps, and what their scripts call"
    assert {one for one in commands if "limits" in one} <= {POLL}


async def commands_of_runs(redis_url: str) -> tuple[list[str], int]:
    """Return the commands that the server got meanwhile, also by scripts, and how many steps."""
    async with AsyncFleet(redis_url) as fleet:
        ids = [await fleet.submit(AGENT, f"question {number}") for number in range(RUNS)]
        async with InlineWorker(load_settings(redis_url=redis_url), [AGENT]) as worker:
            with Redis.from_url(redis_url) as client, client.monitor() as monitor:
                await worker.finish(*ids)
                client.echo("end")
                listen: Callable[[], Any] = monitor.next_command
                found = iter(lambda: str(listen()["command"]), "ECHO end")
                # The text of a script that the server has not seen may say whatever it does.
                commands = [one for one in found if not one.startswith("EVAL ")]
        results = [await fleet.runs.result(run_id) for run_id in ids]
    return commands, sum(len(one.steps) for one in results)
