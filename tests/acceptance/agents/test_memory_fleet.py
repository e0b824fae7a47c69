"""Memory policies on real workers: a kill behind a summary, a custom policy on every worker."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

from support.deadlines import wait_until
from support.runs.lapsed_leases import leases_run_out
from support.workers.fleet_workers import FleetWorker
from support.workers.known_agents import until_known

from stepfleet.orchestrator import AgentRunResult, Fleet, RunStatus, UsageStats
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.agents.recall import KeywordMemory, RedisNotes
from stepfleet.orchestrator.memory.conversation import INSTRUCTIONS
from stepfleet.orchestrator.memory.policy import CONTEXT
from stepfleet.orchestrator.models.pricing import cost_of
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply, Usage
from stepfleet.worker.testing.server import ModelServer

FILE = Path(__file__).parents[1] / "agent_modules" / "memory_agents.py"
AGENTS = load_agents(str(FILE))
Start = Callable[..., FleetWorker]
LAST = 6
USED = Usage(prompt_tokens=100, completion_tokens=10)


def sums_up(request: RequestRecord) -> bool:
    return bool(request.messages[0]["content"] == INSTRUCTIONS)


def rules(request: RequestRecord) -> Reply:
    """Look up one thing after the other, by what was seen last; then answer."""
    if sums_up(request):
        return Reply("what was seen so far", usage=USED)
    seen = [one["content"] for one in request.messages if one["role"] == "tool"]
    number = int(seen[-1].split()[-1]) + 1 if seen else 1
    if number > LAST:
        return Reply("done", usage=USED)
    call = ToolCallReply("look", {"what": f"thing {number}"}, id=f"look-{number}")
    return Reply(tool_calls=(call,), usage=USED)


def test_a_summary_is_paid_for_once_though_its_worker_is_killed(
    start_worker: Start, model: ModelServer, redis_url: str
) -> None:
    """MEM-15, MEM-07: the worker ends behind the journaled summary; another goes on with it."""
    model.follow(rules)
    env = {"STEPFLEET_AGENTS": str(FILE), "STEPFLEET_SLOTS": "1"}
    # The third entry of the journal is the summary; each tool's start before it made one.
    crash = {"STEPFLEET_CRASH_AT": "after-journal:3"}
    victim = start_worker(name="victim", env={**env, **crash})
    with Fleet(redis_url) as fleet:
        run_id = fleet.submit(AGENTS["summing"], "look at everything")
        assert victim.wait(within=60) == -signal.SIGKILL
        assert [sums_up(one) for one in model.requests] == [False, False, True]
        leases_run_out(redis_url)
        start_worker(name="heir", env=env)
        result = fleet.runs.wait(run_id, timeout=60)
    assert (result.status, result.output) == (RunStatus.COMPLETED, "done")
    assert len(result.steps) == LAST + 1
    made = sum(map(sums_up, model.requests))
    assert made >= 2
    assert result.usage.llm_calls == len(model.requests) == LAST + 1 + made
    assert result.usage.total_tokens == 110 * len(model.requests)
    used = UsageStats(prompt_tokens=100, completion_tokens=10, total_tokens=110)
    dear, cheap = cost_of("gpt-4o-mini", used), cost_of("gpt-4.1-nano", used)
    assert dear != cheap
    assert abs(result.cost_usd - (LAST + 1) * dear - made * cheap) < 1e-9
    third = next(one for one in model.requests[3:] if not sums_up(one))
    assert "what was seen so far" in third.messages[1]["content"]
    assert [lost.kind for lost in result.lost_attempts] == ["crash"]


def test_a_custom_policy_runs_on_whichever_worker_does_the_step(
    start_worker: Start, model: ModelServer, redis_url: str
) -> None:
    """MEM-17: the client has no such module; runs and their steps move between two workers."""
    model.follow(rules)
    env = {"STEPFLEET_AGENTS": str(FILE), "STEPFLEET_SLOTS": "1"}
    for name in ("one", "two"):
        start_worker(name=name, env=env)
    until_known(redis_url, "choosy")
    with Fleet(redis_url) as fleet:
        results = done_by_both(fleet, "choosy", "look at everything", 8)
    assert {result.status for result in results} == {RunStatus.COMPLETED}
    for request in model.requests:
        assert len(request.messages) <= 5
        assert request.messages[-1]["content"].startswith("this is step ")


def test_notes_in_redis_reach_the_requests_of_every_worker(
    start_worker: Start, model: ModelServer, redis_url: str
) -> None:
    """MEM-11: added by a client, also while the workers run."""
    model.follow(rules)
    env = {"STEPFLEET_AGENTS": str(FILE), "STEPFLEET_SLOTS": "1"}
    for name in ("one", "two"):
        start_worker(name=name, env=env)
    until_known(redis_url, "noted")
    with Fleet(redis_url) as fleet:
        for note in ("the attic is locked", "the cellar is wet"):
            asyncio.run(remember(redis_url, note))
            place = note.split()[1]
            results = done_by_both(fleet, "noted", f"look at the {place}", 6)
            assert {result.status for result in results} == {RunStatus.COMPLETED}
    for request in model.requests:
        place = request.question.split()[3].strip(",")
        notes = request.messages[-1]["content"]
        assert notes.startswith(CONTEXT)
        assert f"- the {place} is" in notes.splitlines()[1]


def done_by_both(fleet: Fleet, agent: str, question: str, runs: int) -> list[AgentRunResult]:
    """Return the results of so many runs, or of more: one worker may be faster than all of them."""
    results: list[AgentRunResult] = []

    def both_have_worked() -> bool:
        first = len(results)
        given = [f"{question}, {n}" for n in range(first, first + runs)]
        ids = [fleet.submit(agent, text) for text in given]
        results.extend(fleet.runs.wait(run_id, timeout=60) for run_id in ids)
        return len({step.worker for result in results for step in result.steps}) == 2

    wait_until(both_have_worked, what="steps of both workers")
    return results


async def remember(url: str, note: str) -> None:
    notes = RedisNotes(url, "acceptance")
    await KeywordMemory(notes).add(note)
    await notes.aclose()
