"""A tree of runs while workers and Redis end: it is complete, nothing is done twice, costs add up.

The large size is `CHAOS_TREE` (100x10) with `CHAOS_KILLS` (20) of workers and `CHAOS_REDIS_KILLS`
(4) ends of Redis, every other one by SIGKILL; it prints figures. `CHAOS_TREES` (60) are paused,
resumed, cancelled and retried at random.
"""

import os
import random
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import orjson
import pytest
import redis
from support.chaos.recount import await_nothing_owed, check_linked_runs, read_runs
from support.deadlines import wait_until
from support.servers.redis_servers import RedisServer, short_folder
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import AgentRunResult, ConfigurationError, Fleet, RunStatus
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer
from stepfleet.worker.testing.service import RequestLog

AGENTS = Path(__file__).parent / "agent_modules" / "tree_agents.py"
WORKERS = 4
ENDS = 900.0
Strike = Literal["worker", "redis", "redis stop"]

pytestmark = pytest.mark.timeout(2 * ENDS)


@dataclass(frozen=True)
class Size:
    """A tree, and how often workers and Redis end while it grows."""

    branches: int
    leaves: int
    kills: int
    redis_kills: int
    seed: int = 1

    @property
    def calls(self) -> int:
        """About as many model calls as the tree takes."""
        return self.branches * (2 + self.leaves)

    def strikes(self, draw: random.Random) -> list[Strike]:
        """Return what ends, in some order: every other end of Redis is by SIGKILL."""
        ends: list[Strike] = ["redis", "redis stop"]
        found: list[Strike] = ["worker"] * self.kills
        found += [ends[n % 2] for n in range(self.redis_kills)]
        return draw.sample(found, len(found))


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


def play(size: Size, server: RedisServer) -> None:
    """Grow a tree, end workers and Redis at random, and recount."""
    draw = random.Random(size.seed)
    with short_folder() as folder, Fleet(server.url) as fleet:
        calls = folder / "calls.jsonl"
        log = RequestLog(keep=0, path=calls)
        with ModelServer(rules, log=log) as model:
            env = {"STEPFLEET_AGENTS": str(AGENTS), "STEPFLEET_SLOTS": "50"}

            def launch(number: int) -> FleetWorker:
                name = f"w{number}"
                return FleetWorker(folder, server.url, model.url, name=name, env=env).launch()

            workers = [launch(number) for number in range(WORKERS)]
            try:
                root = load_agents(str(AGENTS))["root"]
                began = time.monotonic()
                run_id = fleet.submit(root, f"root {size.branches}x{size.leaves}")
                for number, strike in enumerate(size.strikes(draw)):
                    so_far = size.calls * (number + 1) // (size.kills + size.redis_kills + 2)
                    wait_until(lambda: answered(calls) >= so_far, within=ENDS, what="more calls")  # noqa: B023
                    if strike == "worker":
                        draw.choice(workers).end()  # SIGKILL; those that live go on
                        workers = [one for one in workers if one.exit_code is None]
                        workers.append(launch(WORKERS + number))
                        continue
                    server.kill() if strike == "redis" else server.stop()
                    server.start()
                result = fleet.runs.wait(run_id, timeout=ENDS)
                seconds = time.monotonic() - began
                found = list(tree_of(fleet, result))
                with redis.Redis.from_url(server.url, decode_responses=True) as client:
                    lost = check_linked_runs(client)
            finally:
                for worker in workers:
                    worker.end()
            assert not model.violations
        sent = [orjson.loads(line) for line in calls.read_bytes().splitlines()]
    check(result, found, size)
    assert repeated(sent) <= lost, "a call was paid twice, and no record tells of it"
    sys.stdout.write(
        f"\n1 x {size.branches} x {size.leaves}: {len(found)} runs in {seconds:.0f} s, "
        f"{size.kills} kills, {size.redis_kills} ends of Redis, "
        f"{len(sent)} model calls, {repeated(sent)} repeated, {lost} ambiguous\n"
    )


def check(result: AgentRunResult, found: list[AgentRunResult], size: Size) -> None:
    """Assert that the tree is whole, that nothing was done twice unsaid, and that costs add up."""
    branches, leaves = size.branches, size.leaves
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


def answered(calls: Path) -> int:
    """Return how many calls the model server has answered."""
    return calls.read_bytes().count(b"\n") if calls.exists() else 0


def repeated(sent: list[dict[str, object]]) -> int:
    """Return how many calls were answered, or at work, once more than needed."""
    paid = Counter(
        (one["key"], one["turn"]) for one in sent if one["outcome"] in {"replied", "disconnected"}
    )
    return paid.total() - len(paid)


REQUESTS = (
    ("pause", "resume"),
    ("pause", "resume", "pause", "resume"),
    ("cancel", "retry"),
    ("pause", "cancel", "retry"),
    ("cancel", "retry", "pause", "resume"),
)


def slow(request: RequestRecord) -> Reply:
    """Answer like `rules`, so slowly that requests meet calls of all levels."""
    return replace(rules(request), latency=0.05 + 0.3 * (zlib.crc32(request.key.encode()) % 7))


def request_at_random(fleet: Fleet, run_id: str, draw: random.Random) -> None:
    """Pause, resume, cancel and retry a tree, at any moment."""
    for word in draw.choice(REQUESTS):
        with suppress(ConfigurationError):  # it has completed by now
            getattr(fleet.runs, word)(run_id)
        time.sleep(draw.choice((0.02, 0.3, 1.0)))  # the pace of the requests


def play_requests(trees: int, rounds: int, kills: int, server: RedisServer, seed: int) -> None:
    """Grow trees, request all sorts of things of them, and let them complete."""
    draw = random.Random(seed)
    with short_folder() as folder, Fleet(server.url) as fleet, ModelServer(slow) as model:
        env = {"STEPFLEET_AGENTS": str(AGENTS), "STEPFLEET_SLOTS": "50"}

        def launch(number: int) -> FleetWorker:
            name = f"w{number}"
            return FleetWorker(folder, server.url, model.url, name=name, env=env).launch()

        workers = [launch(number) for number in range(2)]
        try:
            root = load_agents(str(AGENTS))["root"]
            ids = [fleet.submit(root, f"root 2x2 {n}") for n in range(trees)]
            for number in range(rounds):
                if number in draw.sample(range(rounds), kills):
                    workers.pop(0).end()
                    workers.append(launch(2 + number))
                request_at_random(fleet, draw.choice(ids), draw)
            for run_id in ids:
                with suppress(ConfigurationError):
                    fleet.runs.resume(run_id)
                    fleet.runs.retry(run_id)
            results = [fleet.runs.wait(run_id, timeout=ENDS) for run_id in ids]
            found = [one for result in results for one in tree_of(fleet, result)]
            with redis.Redis.from_url(server.url, decode_responses=True) as client:
                await_nothing_owed(client)
                assert {run.header["status"] for run in read_runs(client)} == {"completed"}
        finally:
            for worker in workers:
                worker.end()
        assert not model.violations
    assert {one.status for one in found} == {RunStatus.COMPLETED}
    assert len({one.run_id for one in found}) == len(found) == trees * (1 + 2 * 3)
    for result in results:
        below = [one for one in found if one.run_id.startswith(f"{result.run_id}.")]
        assert result.below_cost_usd == pytest.approx(sum(one.cost_usd for one in below))


def test_a_small_tree_survives_killed_workers(own_redis: Callable[..., RedisServer]) -> None:
    """MULTI-04, MULTI-08, COST-14: in the gate."""
    play(Size(8, 4, kills=4, redis_kills=1), own_redis())


@pytest.mark.chaos
def test_a_large_tree_survives_killed_workers(own_redis: Callable[..., RedisServer]) -> None:
    """MULTI-04, MULTI-08, COST-14."""
    branches, leaves = map(int, os.environ.get("CHAOS_TREE", "100x10").split("x"))
    kills = int(os.environ.get("CHAOS_KILLS", "20"))
    ends = int(os.environ.get("CHAOS_REDIS_KILLS", "4"))
    seed = int(os.environ.get("CHAOS_SEED", "1"))
    play(Size(branches, leaves, kills, ends, seed), own_redis())


def test_trees_complete_whatever_is_requested_of_them(
    own_redis: Callable[..., RedisServer],
) -> None:
    """MULTI-07: in the gate."""
    play_requests(4, 8, 1, own_redis(), seed=1)


@pytest.mark.chaos
def test_many_trees_complete_whatever_is_requested_of_them(
    own_redis: Callable[..., RedisServer],
) -> None:
    """MULTI-07."""
    trees = int(os.environ.get("CHAOS_TREES", "60"))
    kills = int(os.environ.get("CHAOS_KILLS", "6"))
    seed = int(os.environ.get("CHAOS_SEED", "1"))
    play_requests(trees, 3 * trees, kills, own_redis(), seed)
