"""What a person sees of limits: while runs wait for them, and afterwards."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis
from support.deadlines import wait_until
from support.servers.redis_servers import short_folder
from support.workers.command_line import CommandLine
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Fleet
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.scenario import Reply
from stepfleet.worker.testing.server import ModelServer

AGENT = load_agents(str(Path(__file__).parents[1] / "agent_modules" / "agents.py"))["plain"]
NAME, WHY = "openai:scripted", "requests per minute of openai:scripted"


@pytest.fixture
def stepfleet(redis_url: str) -> Iterator[CommandLine]:
    with short_folder() as folder:
        commands = CommandLine(folder, STEPFLEET_REDIS_URL=redis_url, COLUMNS="200")
        try:
            yield commands
        finally:
            commands.end()


def test_a_person_sees_who_waits_for_which_limit(
    start_worker: Callable[..., FleetWorker], redis_url: str, stepfleet: CommandLine
) -> None:
    """In `status`, `explain`, `doctor` while runs wait; in steps, `show`, events afterwards."""
    with (
        ModelServer(lambda _: Reply("done")) as server,
        Fleet(redis_url) as fleet,
        Redis.from_url(redis_url, decode_responses=True) as client,
    ):
        fleet.limits.set(NAME, requests_per_minute=1)
        start_worker(env={"OPENAI_BASE_URL": server.url})
        batch = fleet.submit_batch([{"id": f"{n}", "input": f"{n}"} for n in range(4)], AGENT)
        wait_until(lambda: client.hlen("sf:{limits}:waiting") >= 3, within=30, what="the wait")
        [run_id, *_] = client.hkeys("sf:{limits}:waiting")
        [limited] = fleet.overview().limited
        assert (limited.name, limited.waits_for) == (NAME, WHY)
        assert f"step 1 waits for {WHY}, " in stepfleet("explain", run_id).stdout
        assert f"{limited.waiting} runs wait for {WHY}" in stepfleet("status").stdout
        client.hset("sf:{limits}:settings", NAME, "{")  # by hand, and wrong: nobody is let through
        assert "a limit in Redis cannot be read" in stepfleet("doctor").stdout
        made = len(server.requests)
        fleet.limits.set(NAME, requests_per_minute=60_000)
        assert len(server.requests) == made
        results = list(batch.results())
        [waited] = {one.run_id: one.steps[0] for one in results if one.run_id == run_id}.values()
        completed = [
            event["payload"]
            for event in fleet.runs.events(run_id)
            if event["type"] == "agent.step.completed"
        ]
        shown = stepfleet("show", run_id).stdout
        explained = stepfleet("explain", run_id).stdout
        cleared = stepfleet("limits", "clear", "openai:scriptet")
        refused = stepfleet("submit", "x.jsonl", "-A", "agents.py", "--priority", "urgent").stderr
    assert "there is no limit 'openai:scriptet'" in cleared.stderr
    assert "'--priority': 'urgent' is not one of 'high', 'normal', 'low'" in refused
    assert waited.waited_for == WHY
    assert [one["waited_for"] for one in completed] == [WHY]
    assert completed[0]["waited_seconds"] == waited.waited_seconds > 0
    assert f"before, for {WHY}" in shown
    assert f"longest for {WHY}" in explained
