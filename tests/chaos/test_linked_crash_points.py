"""A worker ends at every named point between runs that wait for each other, or for people."""

import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from support.chaos.crash_cases import unknown_calls
from support.deadlines import wait_until
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import AgentRunResult, Fleet, RunStatus
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.worker.runtime.crash_points import LINK_POINTS
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

Launch = Callable[..., FleetWorker]
TREE = Path(__file__).parent / "agent_modules" / "tree_agents.py"
CAREFUL = Path(__file__).parents[1] / "acceptance" / "agent_modules" / "careful_agents.py"
QUICK = {"STEPFLEET_LEASE": "2", "STEPFLEET_GRACE": "0.5", "STEPFLEET_RESCUE_INTERVAL": "0.2"}
LONG = 90.0
IN_THE_GATE = ("script", "call-attended")

pytestmark = pytest.mark.timeout(420)
MATRIX = [
    pytest.param(
        enqueue,
        point,
        marks=() if (enqueue, point) == IN_THE_GATE else pytest.mark.chaos,
    )
    for enqueue in ("script", "publish")
    for point in LINK_POINTS
]


def tree(request: RequestRecord) -> Reply:
    """The root has two branches, each of which has two leaves."""
    kind = request.key.split()[0]
    if request.turn > 1:
        results = [m for m in request.body["messages"] if m["role"] == "tool"]
        return Reply(f"{len(results)} results", latency=0.01)
    below = {"root": "branch", "branch": "leaf"}.get(kind)
    if below is None:
        return Reply("green", latency=0.01)
    texts = [f"{below} {request.key.removeprefix(kind)} {n}" for n in range(2)]
    calls = tuple(ToolCallReply(below, {"input": text}) for text in texts)
    return Reply("", tool_calls=calls, latency=0.01)


def victim_of(launch: Launch, url: str, at: str, died: Path, env: dict[str, str]) -> FleetWorker:
    trap = {"STEPFLEET_CRASH_AT": at, "STEPFLEET_CRASH_ONCE": str(died)}
    return launch(url, name="victim", env={**env, **trap})


def succeed(launch: Launch, url: str, victim: FleetWorker, died: Path, env: dict[str, str]) -> None:
    """Wait until the victim is dead, and launch another worker in its place."""
    wait_until(died.exists, within=LONG, what="the death")
    assert victim.wait() == -signal.SIGKILL
    launch(url, name="heir", env=env)


@pytest.mark.parametrize(("enqueue", "point"), MATRIX)
def test_a_tree_is_whole_whoever_dies_at_a_point(
    enqueue: str, point: str, model: ModelServer, launch: Launch, redis_url: str, tmp_path: Path
) -> None:
    """MULTI-04, MULTI-08, COST-14: every run once, its end told once, what follows begins."""
    model.follow(tree)
    before = Counter(model.log.counts)
    env = {**QUICK, "STEPFLEET_AGENTS": str(TREE), "STEPFLEET_ENQUEUE": enqueue}
    agents, died = load_agents(str(TREE)), tmp_path / "died"
    with Fleet(settings=load_settings(redis_url=redis_url, enqueue=enqueue)) as fleet:
        run_id = fleet.submit(agents["root"], f"root {enqueue} {point}")
        last = fleet.submit(agents["leaf"], "last {output}", after=[run_id])
        victim = victim_of(launch, redis_url, f"{point}:2", died, env)
        succeed(launch, redis_url, victim, died, env)
        result = fleet.runs.wait(run_id, timeout=LONG)
        assert fleet.runs.wait(last, timeout=LONG).success
        branches = [fleet.runs.result(end.run_id) for end in result.steps[0].runs]
        leaves = [fleet.runs.result(end.run_id) for one in branches for end in one.steps[0].runs]
        assert not fleet.runs.page(status="in_progress").runs
    found = [result, *branches, *leaves]
    assert (len(found), len({one.run_id for one in found})) == (7, 7)
    assert {one.status for one in found} == {RunStatus.COMPLETED}
    assert [one.output for one in (result, *branches)] == ["2 results"] * 3
    assert result.below_cost_usd == pytest.approx(sum(one.cost_usd for one in found[1:]))
    assert calls_of(model, before) <= 2 * 3 + 4 + 1 + ambiguous(found), "paid twice, and untold"


@pytest.mark.chaos
@pytest.mark.parametrize("at", ["after-claim:2", "tool-started:1", "during-tool:1", "after-tool:1"])
def test_an_approved_call_is_made_at_most_once_whoever_dies(
    at: str, model: ModelServer, launch: Launch, redis_url: str, effects: Path, tmp_path: Path
) -> None:
    """TOOL-26: between the approval and the call, and in the midst of it: never twice."""

    def rules(request: RequestRecord) -> Reply:
        if request.turn > 1:
            return Reply("paid")
        return Reply("", tool_calls=(ToolCallReply("refund", {"customer": "ada", "usd": 250.0}),))

    model.follow(rules)
    env, died = {**QUICK, "STEPFLEET_AGENTS": str(CAREFUL)}, tmp_path / "died"
    with Fleet(redis_url) as fleet:
        run_id = fleet.submit(load_agents(str(CAREFUL))["clerk"], f"refund at {at}")
        victim = victim_of(launch, redis_url, at, died, env)
        wait_until(lambda: fleet.approvals.of_run(run_id), within=LONG, what="the call")
        assert fleet.decide(run_id, by="grace").applied == 1
        succeed(launch, redis_url, victim, died, env)
        result = fleet.runs.wait(run_id, timeout=LONG)
    (call,) = result.steps[0].tool_calls
    assert call.decision is not None
    assert call.decision.by == "grace"
    # A refund that was begun is never made again: then nobody knows whether it was.
    assert unknown_calls([result]) == (call.error is not None)
    assert result.success == (call.error is None)
    assert len(effects.read_text().splitlines()) in ({0, 1} if call.error else {1})
    assert at != "after-claim:2" or call.error is None, "it was not begun"


def ambiguous(found: list[AgentRunResult]) -> int:
    return sum(one.ambiguous for run in found for one in run.lost_attempts)


def calls_of(model: ModelServer, before: Counter[tuple[str, int]]) -> int:
    """Return how many calls the model server got since then."""
    return (Counter(model.log.counts) - before).total()
