"""A tree of runs while workers are killed: it is complete, nothing is done twice, costs add up.

The large size is `CHAOS_TREE` (100x10) with `CHAOS_KILLS` (20); it prints figures.
"""

import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import pytest
from support.deadlines import wait_until
from support.servers.redis_servers import RedisServer, short_folder
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import AgentRunResult, Fleet, RunStatus
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing import (
    ModelServer,
    Reply,
    RequestLog,
    RequestRecord,
    ToolCallReply,
)

AGENTS = Path(__file__).parent / "agent_modules" / "tree_agents.py"
WORKERS = 4
ENDS = 900.0

pytestmark = pytest.mark.timeout(2 * ENDS)


def rules(request: RequestRecord) -> Reply:
    """`root BxL` has B branches `branch I L`, each of which has L leaves."""
    kind, *numbers = request.key.split()
    if request.turn > 1:
        results = [m for m in request.body["messages"] if m["role"] == "tool"]
        return Reply(f"{len(results)} results", latency=0.02)
    if kind == "root":
        branches, leaves = map(int, numbers[0].split("x"))
        wanted = [("branch", f"branch {n} {leaves}") for n in range(branches)]
    elif kind == "branch":
        wanted = [("leaf", f"leaf {numbers[0]} {n}") for n in range(int(numbers[1]))]
    else:
        return Reply("green", latency=0.05)
    calls = tuple(ToolCallReply(name, {"input": text}) for name, text in wanted)
    return Reply("", tool_calls=calls, latency=0.02)


def tree_of(fleet: Fleet, result: AgentRunResult) -> Iterator[AgentRunResult]:
    """Yield a run and all below it."""
    yield result
    for step in result.steps:
        for end in step.runs:
            yield from tree_of(fleet, fleet.runs.result(end.run_id))


def play(branches: int, leaves: int, kills: int, redis: RedisServer, seed: int) -> None:
    """Grow a tree, kill workers at random, and recount."""
    draw = random.Random(seed)
    with short_folder() as folder, Fleet(redis.url) as fleet:
        calls = folder / "calls.jsonl"
        log = RequestLog(keep=0, path=calls)
        with ModelServer(rules, log=log) as model:
            env = {"STEPFLEET_AGENTS": str(AGENTS), "STEPFLEET_SLOTS": "50"}

            def launch(number: int) -> FleetWorker:
                name = f"w{number}"
                return FleetWorker(folder, redis.url, model.url, name=name, env=env).launch()

            workers = [launch(number) for number in range(WORKERS)]
            try:
                root = load_agents(str(AGENTS))["root"]
                began, key = time.monotonic(), f"root {branches}x{leaves}"
                run_id = fleet.submit(root, key)
                for kill in range(kills):
                    so_far = branches * (2 + leaves) * (kill + 1) // (kills + 2)
                    wait_until(lambda: answered(calls) >= so_far, within=ENDS, what="more calls")  # noqa: B023
                    draw.choice(workers).end()  # SIGKILL; those that live go on
                    workers = [one for one in workers if one.exit_code is None]
                    workers.append(launch(WORKERS + kill))
                result = fleet.runs.wait(run_id, timeout=ENDS)
                seconds = time.monotonic() - began
                found = list(tree_of(fleet, result))
            finally:
                for worker in workers:
                    worker.end()
            assert not model.violations
        sent = [orjson.loads(line) for line in calls.read_bytes().splitlines()]
    check(result, found, sent, branches, leaves)
    told = sum(one.ambiguous for run in found for one in run.lost_attempts)
    sys.stdout.write(
        f"\n1 x {branches} x {leaves}: {len(found)} runs in {seconds:.0f} s, {kills} kills, "
        f"{len(sent)} model calls, {repeated(sent)} repeated, {told} ambiguous\n"
    )


def check(
    result: AgentRunResult,
    found: list[AgentRunResult],
    sent: list[dict[str, object]],
    branches: int,
    leaves: int,
) -> None:
    """Assert that the tree is whole, that nothing was done twice unsaid, and that costs add up."""
    assert result.status is RunStatus.COMPLETED, result.debug()
    assert result.output == f"{branches} results"
    assert len(found) == 1 + branches * (1 + leaves)
    assert len({one.run_id for one in found}) == len(found)
    assert {one.status for one in found} == {RunStatus.COMPLETED}
    assert {one.output for one in found if one.agent_name == "branch"} == {f"{leaves} results"}
    below = [one for one in found if one.run_id != result.run_id]
    assert result.below_cost_usd == pytest.approx(sum(one.cost_usd for one in below))
    tokens = sum(one.usage.total_tokens for one in found)
    assert result.total_usage.total_tokens == tokens
    lost = sum(one.ambiguous for run in found for one in run.lost_attempts)
    assert repeated(sent) <= lost, "a call was paid twice, and no record tells of it"


def answered(calls: Path) -> int:
    """Return how many calls the model server has answered."""
    return calls.read_bytes().count(b"\n") if calls.exists() else 0


def repeated(sent: list[dict[str, object]]) -> int:
    """Return how many calls were answered, or at work, once more than needed."""
    paid = Counter(
        (one["key"], one["turn"]) for one in sent if one["outcome"] in {"replied", "disconnected"}
    )
    return paid.total() - len(paid)


def test_a_small_tree_survives_killed_workers(own_redis: Callable[..., RedisServer]) -> None:
    """MULTI-04, MULTI-08, COST-14: in the gate."""
    play(8, 4, 4, own_redis(), seed=1)


@pytest.mark.chaos
def test_a_large_tree_survives_killed_workers(own_redis: Callable[..., RedisServer]) -> None:
    """MULTI-04, MULTI-08, COST-14."""
    branches, leaves = map(int, os.environ.get("CHAOS_TREE", "100x10").split("x"))
    kills = int(os.environ.get("CHAOS_KILLS", "20"))
    play(branches, leaves, kills, own_redis(), seed=int(os.environ.get("CHAOS_SEED", "1")))
