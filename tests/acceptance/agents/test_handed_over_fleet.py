"""Runs that go from one agent to another, on real workers."""

import signal
from collections.abc import Callable
from pathlib import Path

from support.runs.lapsed_leases import leases_run_out
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Fleet, StopReason
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

Start = Callable[..., FleetWorker]
FILE = Path(__file__).parents[1] / "agent_modules" / "desk_agents.toml"
ENV = {"STEPFLEET_AGENTS": str(FILE), "STEPFLEET_SLOTS": "1"}
LONG = 60.0


def desk(request: RequestRecord) -> Reply:
    """Answer as the agent whose instructions came; what goes round is handed to and fro."""
    who = request.messages[0]["content"].removeprefix("You are ").rstrip(".")
    assert request.body["model"] == {"reception": "gpt-4o-mini", "billing": "gpt-4o"}[who]
    other = "billing" if who == "reception" else "reception"
    if who == "reception" or "round" in request.key:
        call = ToolCallReply(f"transfer_to_{other}", {"reason": f"{who} cannot"})
        return Reply("", tool_calls=(call,), latency=0.01)
    asked = [str(one["content"]) for one in request.messages if one["role"] == "user"]
    return Reply(f"{who} answers {asked[-1]}", latency=0.01)


def test_a_kill_behind_the_hand_off_leaves_it_to_the_next_worker(
    start_worker: Start, model: ModelServer, redis_url: str
) -> None:
    """The worker is killed between the commit and the next step; nothing is done twice."""
    model.follow(desk)
    crash = {"STEPFLEET_CRASH_AT": "commit-applied"}
    victim = start_worker(name="victim", env={**ENV, **crash})
    with Fleet(redis_url) as fleet:
        run_id = fleet.submit("reception", "an invoice", tenant="acme")
        assert victim.wait(within=LONG) == -signal.SIGKILL
        assert fleet.runs.page(agent="billing").runs[0].run_id == run_id
        leases_run_out(redis_url)
        start_worker(name="heir", env=ENV)
        result = fleet.runs.wait(run_id, timeout=LONG)
        assert (result.agent_name, result.output) == ("billing", "billing answers an invoice")
        assert [one.agent for one in result.steps] == ["reception", "billing"]
        assert (result.max_iterations, len(model.requests)) == (6, 2)
        rows = fleet.costs("agent", tenant="acme").rows
        assert {row.group["agent"]: row.calls for row in rows} == {"reception": 1, "billing": 1}
        fleet.runs.send(run_id, "a receipt")
        further = fleet.runs.wait(run_id, timeout=LONG)
        assert (further.agent_name, further.output) == ("billing", "billing answers a receipt")
        earlier(fleet, run_id)


def earlier(fleet: Fleet, run_id: str) -> None:
    """Go back before the hand-off, by a fork and by a checkpoint; then again from the first."""
    for at, steps in ((0, ["reception", "billing"]), (1, ["reception", "billing"])):
        fork = fleet.history.fork(run_id, at=at, max_steps=4)
        result = fleet.runs.wait(fork, timeout=LONG)
        assert ([one.agent for one in result.steps], result.max_iterations) == (steps, 4)
        checkpoint = fleet.history.checkpoint(run_id, at=at)
        assert checkpoint.config.name == ("reception", "billing")[at]
        copy = fleet.history.restore(checkpoint, run_id=fork_id(at))
        restored = fleet.runs.wait(copy, timeout=LONG)
        assert [one.agent for one in restored.steps] == steps
        assert fleet.history.checkpoint(copy, at=0).config.name == "reception"


def fork_id(at: int) -> str:
    """Return an id for a copy."""
    return f"00000000-0000-4000-8000-00000000000{at}"


def test_a_run_that_goes_round_ends_at_its_own_limit(
    start_worker: Start, model: ModelServer, redis_url: str
) -> None:
    """Each step names its agent, in its result and in each page of a timeline."""
    model.follow(desk)
    start_worker(env=ENV)
    with Fleet(redis_url) as fleet:
        batch = fleet.submit_batch([{"id": "a", "input": "round and round"}], agent="reception")
        result = next(iter(batch.results()))
        assert (result.stop_reason, result.steps_used) == (StopReason.STEPS_LIMIT, 6)
        assert [one.agent for one in result.steps] == ["reception", "billing"] * 3
        assert result.agent_name == "reception"
        whole = fleet.runs.timeline(result.run_id).steps
        assert [one.agent for one in whole] == ["reception", "billing"] * 3
        alone = [fleet.runs.timeline(result.run_id, first=n, limit=1).steps[0] for n in range(1, 7)]
        assert alone == list(whole), "a page of steps knows what was before and behind it"
        batch.retry(max_steps=7)
        again = fleet.runs.wait(result.run_id, timeout=LONG)
        assert [one.agent for one in again.steps][5:] == ["billing", "reception"]
