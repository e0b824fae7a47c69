"""A conversation of several turns on one run, through a real worker."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.servers.redis_servers import short_folder
from support.workers.command_line import CommandLine
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Fleet, RunStatus
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

LONG = 60.0
AGENTS = load_agents(str(Path(__file__).parents[1] / "agent_modules" / "agents.py"))


@pytest.fixture
def stepfleet(redis_url: str) -> Iterator[CommandLine]:
    with short_folder() as folder:
        commands = CommandLine(folder, STEPFLEET_REDIS_URL=redis_url)
        try:
            yield commands
        finally:
            commands.end()


def twice(request: RequestRecord) -> Reply:
    """One tool call per user message, then an answer to it."""
    last = request.messages[-1]
    if last["role"] == "user":
        return Reply(tool_calls=(ToolCallReply("look", {"what": last["content"]}),))
    asked = [one["content"] for one in request.messages if one["role"] == "user"]
    return Reply(f"answer {len(asked)} to {asked[-1]}")


def test_a_second_turn_has_the_full_history_and_fresh_counters(
    model: ModelServer,
    start_worker: Callable[..., FleetWorker],
    redis_url: str,
    stepfleet: CommandLine,
) -> None:
    """STATE-09, CONT-20, TIME-03: two turns of as many steps as an execution may have."""
    model.follow(twice)
    start_worker()
    with Fleet(redis_url) as fleet:
        run_id = fleet.submit(AGENTS["plain"], "first", max_steps=3)
        before = fleet.runs.wait(run_id, timeout=LONG)
        assert before.output == "answer 1 to first"

        done = stepfleet("send", run_id, "second")

        assert done.returncode == 0, done.stderr
        assert f"Run {run_id} has the message and continues at step 3" in done.stdout
        after = fleet.runs.wait(run_id, timeout=LONG)
        stored = fleet.runs.show(run_id)
    assert (after.status, after.output) == (RunStatus.COMPLETED, "answer 2 to second")
    assert [step.step for step in after.steps] == [1, 2, 3, 4]
    assert after.usage.total_tokens > before.usage.total_tokens
    roles = [one["role"] for one in model.requests[-1].messages]
    turn = ["user", "assistant", "tool", "assistant"]
    assert roles == ["system", *turn, *turn[:-1]]
    state = stored.state
    assert (state.step_count, state.session_steps) == (2, 4)
    assert state.info.execution == 2
    assert state.usage.total_tokens == after.usage.total_tokens - before.usage.total_tokens

    (stepfleet.folder / "message").write_text("third\n")
    third = stepfleet("send", run_id, "-", "--json", "--raise", "max_steps=2", feed="message")

    assert '"answer": "sent"' in third.stdout, third.stderr
    with Fleet(redis_url) as fleet:
        last = fleet.runs.wait(run_id, timeout=LONG)
    assert last.steps[-1].thought == "answer 3 to third"


def test_what_cannot_be_sent_is_one_message(
    model: ModelServer,
    start_worker: Callable[..., FleetWorker],
    redis_url: str,
    stepfleet: CommandLine,
) -> None:
    model.follow(lambda _: Reply("late", latency=600.0))
    start_worker()
    (stepfleet.folder / "bytes").write_bytes(b"caf\xe9")
    with Fleet(redis_url) as fleet:
        run_id = fleet.submit(AGENTS["plain"], "first")

        refused = {
            "has not ended": stepfleet("send", run_id, "more"),
            "has the id 'nobody'": stepfleet("send", "nobody", "more"),
            "field 'text' is empty": stepfleet("send", run_id, ""),
            "is not UTF-8": stepfleet("send", run_id, "-", feed="bytes"),
            "FIELD=VALUE": stepfleet("send", run_id, "more", "--raise", "max_steps"),
        }
        fleet.runs.cancel(run_id)
    for said, done in refused.items():
        assert done.returncode == 2, done.stdout
        assert said in done.stderr
        assert "Traceback" not in done.stderr
