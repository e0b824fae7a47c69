"""The arithmetic example on each protocol, with faults and a killed worker: nothing is lost.

Answers are compared with the problems, costs and repeated calls with what the model server sent.
The large size is `CHAOS_RUNS` (1,000); it prints figures.
"""

import os
import runpy
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.deadlines import wait_until
from support.servers.redis_servers import RedisServer, short_folder
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import AgentRunResult, Fleet, RunStatus
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.models.services import environment_of
from stepfleet.worker.testing.scenario import Faults
from stepfleet.worker.testing.server import ModelServer
from stepfleet.worker.testing.service import RequestLog

AGENTS = Path(__file__).parent / "agent_modules" / "arithmetic_agents.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic"
PROVIDERS = ("openai", "openai-responses", "anthropic", "google", "bedrock")
FAULTS = Faults(rate=0.05, first_attempts=3, retry_after=0.1)
INPUT, OUTPUT = 1e-6, 2e-6  # USD a token, as in the agents' module
ENDS = 1200.0

pytestmark = pytest.mark.timeout(2 * ENDS)


def play(provider: str, runs: int, redis: RedisServer) -> None:
    """Run so many problems, kill a worker that has some in the middle, and recount."""
    problems = list(runpy.run_path(str(EXAMPLE / "problems.py"))["problems"](runs, seed=1))
    rules = runpy.run_path(str(EXAMPLE / "rules.py"))["rules"]
    solver = load_agents(str(AGENTS))[provider]
    with short_folder() as folder, Fleet(redis.url) as client:
        calls, workers = folder / "calls.jsonl", list[FleetWorker]()
        log = RequestLog(keep=0, path=calls)
        with ModelServer(rules, faults=FAULTS, log=log) as model:
            root = model.url.removesuffix("/v1")
            own = {**environment_of(root), "STEPFLEET_AGENTS": str(AGENTS)}

            def launch(name: str) -> FleetWorker:
                worker = FleetWorker(folder, redis.url, model.url, name=name, env=own)
                workers.append(worker.launch())
                return worker

            try:
                first, _ = launch("w1"), launch("w2")
                began = time.monotonic()
                batch = client.submit_batch(problems, agent=solver)
                wait_until(lambda: batch.progress().done > runs // 3, within=ENDS, what="a third")
                first.end()  # SIGKILL
                launch("w3")
                wait_until(lambda: batch.progress().ended, within=ENDS, what="the batch's end")
                seconds = time.monotonic() - began
                results = {str(one.line_id): one for one in batch.results()}
            finally:
                for worker in workers:
                    worker.end()
            assert not model.violations
        sent = read_calls(calls)
    sys.stdout.write(f"\n{provider}: {runs} runs, {seconds:.0f} s, {figures(results, sent)}\n")
    check(problems, results, sent)


def read_calls(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def check(
    problems: list[dict[str, Any]], results: dict[str, AgentRunResult], sent: list[dict[str, Any]]
) -> None:
    """Assert that each run has its answer, its steps, and the cost of what was sent for them."""
    usage: dict[tuple[str, int], set[tuple[int, int]]] = {}
    for one in sent:
        if one["outcome"] == "replied":
            counts = (one["prompt_tokens"], one["completion_tokens"])
            usage.setdefault((one["key"], one["turn"]), set()).add(counts)
    assert results.keys() == {one["id"] for one in problems}
    for problem in problems:
        result = results[problem["id"]]
        assert result.status is RunStatus.COMPLETED, result.debug()
        assert f" {problem['metadata']['answer']} " in (result.output or "")
        turns = [counts for (key, _), counts in usage.items() if key == problem["input"]]
        assert len(turns) == len(result.steps), "a step without an answer, or the reverse"
        costs = sum(INPUT * prompt + OUTPUT * answer for ((prompt, answer),) in turns)
        assert result.cost_usd == pytest.approx(costs)
    lost = sum(one.ambiguous for result in results.values() for one in result.lost_attempts)
    assert repeated(sent) <= lost, "a call was paid twice, and no record tells of it"


def repeated(sent: list[dict[str, Any]]) -> int:
    """Return how many calls were answered, or at work, once more than needed."""
    paid = Counter(
        (one["key"], one["turn"]) for one in sent if one["outcome"] in {"replied", "disconnected"}
    )
    return paid.total() - len(paid)


def figures(results: dict[str, AgentRunResult], sent: list[dict[str, Any]]) -> str:
    completed = sum(one.status is RunStatus.COMPLETED for one in results.values())
    steps = sum(len(one.steps) for one in results.values())
    faults = Counter(one["outcome"] for one in sent if one["outcome"] != "replied")
    return (
        f"{completed} completed, {steps} committed steps, {len(sent)} model calls: {dict(faults)}, "
        f"{repeated(sent)} repeated, {sum(one.cost_usd for one in results.values()):.6f} USD"
    )


def test_runs_on_another_protocol_survive_faults_and_a_killed_worker(
    own_redis: Callable[..., RedisServer],
) -> None:
    """LLM-04, DIST-04: small, in the gate."""
    play("anthropic", 60, own_redis())


@pytest.mark.chaos
@pytest.mark.parametrize("provider", PROVIDERS)
def test_many_runs_on_every_protocol_survive_faults_and_a_killed_worker(
    own_redis: Callable[..., RedisServer], provider: str
) -> None:
    """LLM-04, DIST-04."""
    play(provider, int(os.environ.get("CHAOS_RUNS", "1000")), own_redis())
