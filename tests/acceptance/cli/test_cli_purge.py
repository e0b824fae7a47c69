"""`stepfleet purge` as it is typed: what it says, and that nothing goes without a yes."""

from collections.abc import Iterator

import orjson
import pytest
from support.servers.redis_servers import short_folder
from support.workers.command_line import CommandLine

from stepfleet.orchestrator import Agent, Fleet

AGENT = Agent("plain", model="openai:none", instructions="Be brief.")


@pytest.fixture
def stepfleet(redis_url: str) -> Iterator[CommandLine]:
    with short_folder() as folder:
        commands = CommandLine(folder, STEPFLEET_REDIS_URL=redis_url)
        try:
            yield commands
        finally:
            commands.end()


def test_ended_runs_are_purged_after_a_yes(redis_url: str, stepfleet: CommandLine) -> None:
    with Fleet(redis_url) as fleet:
        runs = [fleet.submit(AGENT, "x") for _ in range(3)]
        for run_id in runs[:2]:
            fleet.runs.cancel(run_id)
        dry = stepfleet("purge", "--dry-run")
        assert dry.returncode == 0
        assert "2 ended runs would be removed" in dry.stdout
        unasked = stepfleet("purge")
        assert unasked.returncode == 2
        assert "--yes" in unasked.stderr
        told = stepfleet("purge", "--yes", "--status", "cancelled", "--json")
        assert orjson.loads(told.stdout) == {"runs": 2, "dry_run": False}
        again = stepfleet("purge", "--yes", "--older-than", "1d")
        assert "0 ended runs removed" in again.stdout
        wrong = stepfleet("purge", "--older-than", "soon")
        assert wrong.returncode == 2
        assert "--older-than" in wrong.stderr
        assert not fleet.runs.show(runs[2]).state.status.is_terminal
