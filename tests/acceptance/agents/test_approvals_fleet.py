"""Calls that wait for people, on real workers: decided once, made once, without a slot."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import orjson
import pytest
from support.deadlines import wait_until
from support.workers.command_line import CommandLine
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import ConfigurationError, Fleet
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

Start = Callable[..., FleetWorker]
FILE = Path(__file__).parents[1] / "agent_modules" / "careful_agents.py"
CLERK = load_agents(str(FILE))["clerk"]
LONG = 60.0


@pytest.fixture
def env(effects: Path) -> dict[str, str]:
    return {"STEPFLEET_AGENTS": str(FILE), "EFFECTS": str(effects), "STEPFLEET_SLOTS": "2"}


def rules(request: RequestRecord) -> Reply:
    """Do what the input says: `refund 250`, `delete`, `ask`."""
    word, _, rest = request.key.partition(" ")
    if request.turn > 1:
        results = [str(m["content"]) for m in request.body["messages"] if m["role"] == "tool"]
        return Reply("; ".join(results), latency=0.01)
    calls = {
        "refund": lambda: [
            ToolCallReply("refund", {"customer": "ada", "usd": float(usd)}) for usd in rest.split()
        ],
        "delete": lambda: [ToolCallReply("delete", {"what": "all"})],
        "ask": lambda: [
            ToolCallReply("ask_person", {"question": "which?", "options": ["red", "blue"]})
        ],
    }[word]()
    return Reply("", tool_calls=tuple(calls), latency=0.01)


def waiting(fleet: Fleet, count: int) -> None:
    wait_until(
        lambda: len(list(fleet.approvals.all())) == count, within=LONG, what="calls that wait"
    )


def test_a_call_that_needs_approval_is_made_after_it_and_once(
    model: ModelServer, start_worker: Start, env: dict[str, str], effects: Path, redis_url: str
) -> None:
    """The rule lets small ones through; a kill while it waits costs nothing; a denial is read."""
    model.follow(rules)
    first = start_worker(env=env)
    with Fleet(redis_url) as fleet:
        run_id = fleet.submit(CLERK, "refund 250 20")
        denied = fleet.submit(CLERK, "refund 999")
        waiting(fleet, 2)
        assert effects.read_text().splitlines() == [f"{run_id} ada 20"]
        first.end()
        (ask,) = (one for one in fleet.approvals.all() if one.run_id == run_id)
        assert (ask.tool, ask.arguments) == ("refund", {"customer": "ada", "usd": 250.0})
        assert fleet.decide(run_id, by="grace").applied == 1
        late = fleet.decide(denied, approve=False, reason="ask the boss", by="grace")
        assert late.applied == 1
        with pytest.raises(ConfigurationError, match="was approved by grace"):
            fleet.decide(run_id)
        start_worker(name="w2", env=env)
        result = fleet.runs.wait(run_id, timeout=LONG)
        assert result.success
        assert result.output == "paid 250 to ada; paid 20 to ada"
        decision = result.steps[0].tool_calls[0].decision
        assert decision is not None
        assert (decision.by, decision.approved) == ("grace", True)
        other = fleet.runs.wait(denied, timeout=LONG)
        assert other.success
        assert "denied by grace: ask the boss" in (other.output or "")
        events = [event["type"] for event in fleet.runs.events(run_id)]
    assert events.count("agent.approval.requested") == 1
    assert events.count("agent.approval.decided") == 1
    assert len(effects.read_text().splitlines()) == 2


def test_questions_time_limits_and_equal_calls_on_the_command_line(
    model: ModelServer,
    start_worker: Start,
    env: dict[str, str],
    redis_url: str,
    commands: CommandLine,
) -> None:
    cli = partial(commands, STEPFLEET_REDIS_URL=redis_url)
    model.follow(rules)
    start_worker(env=env)
    with Fleet(redis_url) as fleet:
        expired = fleet.submit(CLERK, "delete")
        asks = fleet.submit(CLERK, "ask")
        given = [{"id": f"{n}", "input": "refund 300"} for n in range(30)]
        batch = fleet.submit_batch(given, agent=CLERK)
        late = fleet.runs.wait(expired, timeout=LONG)
        assert late.success
        assert "denied by the time limit: nobody decided in time" in (late.output or "")
        decided = [one for one in fleet.runs.events(expired) if one["type"].endswith("decided")]
        assert [one["payload"]["by_default"] for one in decided] == [True]
        waiting(fleet, 31)
        told = cli("explain", asks).stdout
        assert "a person's answer" in told
        assert ", since 20" in told
        listed = cli("approvals")
        assert "31 calls wait for a person" in listed.stdout
        assert "30" in listed.stdout
        wrong = cli("answer", asks, "green")
        assert wrong.returncode == 2
        assert ": red, blue" in wrong.stderr
        assert "1 call answered" in cli("answer", asks, "blue", "--by", "bob").stdout
        done = cli("approve", "--batch", batch.id, "--tool", "refund", "--yes")
        assert "30 calls approved" in done.stdout
        assert fleet.runs.wait(asks, timeout=LONG).output == "blue"
        assert "answered by bob, 20" in cli("show", asks).stdout
        assert all(result.success for result in batch.results())
        assert "Nothing waits" in cli("approvals").stdout


def test_whoever_waits_for_runs_reads_that_these_wait_for_people(
    model: ModelServer,
    start_worker: Start,
    env: dict[str, str],
    redis_url: str,
    commands: CommandLine,
) -> None:
    """A question with the command that answers it; of a batch, how many calls, and their list."""
    # The lease that the worker has: by it a silent one counts as gone.
    place = {"STEPFLEET_REDIS_URL": redis_url, "STEPFLEET_LEASE": "30"}
    cli = CommandLine(commands.folder, **place)
    model.follow(rules)
    start_worker(env=env)
    with Fleet(redis_url) as fleet:
        wait_until(
            lambda: any(one.alive for one in fleet.overview().workers), within=LONG, what="a worker"
        )
    asking = commands.start("ask", "clerk", "ask", **place)
    commands.until_said("clerk asks: which? (red, blue)\n  stepfleet decide ", within=LONG)
    run_id = commands.said.rpartition("stepfleet decide ")[2].split()[0]
    for how in ((), ("--approve", "--deny"), ("--answer", "blue", "--reason", "so")):
        assert cli("decide", run_id, *how).returncode == 2
    assert "1 call answered" in cli("decide", run_id, "--answer", "blue").stdout
    assert asking.wait(LONG) == 0, commands.said
    assert (commands.folder / "started.out").read_text() == "blue\n"

    lines = commands.questions("refund 300", "refund 400")
    waiting_for = commands.start("submit", lines, "--agent", "clerk", "--wait", **place)
    told = "Nothing moves: 2 calls wait for people: stepfleet approvals --batch "
    commands.until_said(told, within=LONG)
    batch = commands.said.partition(told)[2].split()[0]
    status = cli("status", batch).stdout
    assert f"2 calls wait for people:\n  stepfleet approvals --batch {batch}\n" in status
    assert orjson.loads(cli("status", batch, "--json").stdout)["waiting_for_people"] == 2

    assert f"line q0 of batch {batch}" in cli("approvals").stdout
    first = cli("approve", "q0", "-b", batch)
    assert "1 call approved" in first.stdout
    for again in (cli("deny", "q0:0", "-b", batch), cli("decide", "q0:0", "-b", batch, "--deny")):
        assert again.returncode == 2
        assert "approved by " in again.stderr
    for other in (["--batch", "nosuch"], ["--batch", batch, "--tool", "unknown"]):
        for words in (("approve",), ("decide", "--approve")):
            nothing = cli(*words, *other, "--yes")
            assert (nothing.returncode, nothing.stdout[:28]) == (1, "Nothing that waits matches: ")
    unknown = cli("answer", "q7", "blue", "-b", batch)
    assert unknown.returncode == 2
    assert f"no line of batch {batch} has the id 'q7'" in unknown.stderr
    (left,) = orjson.loads(cli("approvals", "--json").stdout)
    assert cli("approve", "q1", "--key", f"{left['key']}0").returncode == 2
    decided = cli("decide", "q1", "--key", left["key"], "--approve")
    assert "1 call approved" in decided.stdout
    assert waiting_for.wait(LONG) == 0, commands.said
    assert "for people" not in cli("status", batch).stdout
