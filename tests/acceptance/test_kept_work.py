"""What a worker holds it keeps: hints for its own work, a blocked loop, a stop in mid-claim."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from deadlines import wait_until
from fleet_workers import AGENTS, FleetWorker
from lapsed_leases import leases_run_out

from stepfleet.orchestrator import Fleet
from stepfleet.orchestrator.loading_agents import load_agents
from stepfleet.worker.testing import ModelServer, Reply, ToolCallReply

Start = Callable[..., FleetWorker]
FOLDER = Path(__file__).parent / "agents"
PLAIN = load_agents(str(AGENTS))["plain"]
HEAVY = load_agents(str(FOLDER / "heavy_agents.py"))["heavy"]
LONG = 60.0
RUNS = 10
HEADER = 3
"""Colons in the key of a run's header."""


@pytest.fixture
def fleet(redis_url: str) -> Iterator[Fleet]:
    with Fleet(redis_url) as opened:
        yield opened


def leased_runs(redis_url: str) -> int:
    """Return how many runs have a lease that has not run out."""
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        now = client.time()[0] * 1000
        headers = [key for key in client.scan_iter("sf:{*}:run:*") if key.count(":") == HEADER]
        return sum(int(client.hget(key, "lease") or 0) > now for key in headers)


def test_a_worker_does_not_begin_again_what_it_holds_itself(
    model: ModelServer, start_worker: Start, fleet: Fleet, redis_url: str
) -> None:
    """As a Redis sees it whose clock was set forward: every lease is over at once."""
    model.follow(lambda _: Reply("answer", latency=600.0))
    worker = start_worker()
    fleet.submit_batch([{"input": f"question {n}"} for n in range(RUNS)], agent=PLAIN)
    wait_until(lambda: len(model.requests) == RUNS, within=LONG, what="the calls under way")

    leases_run_out(redis_url)

    def is_over() -> bool:
        return worker.log.count("dropped: leased") >= RUNS or len(model.requests) > RUNS

    wait_until(is_over, within=LONG, what="the hints' refusal")
    assert len(model.requests) == RUNS
    assert leased_runs(redis_url) == RUNS


def test_a_worker_does_not_start_a_heavy_tool_again_that_it_runs(
    model: ModelServer, start_worker: Start, fleet: Fleet, redis_url: str, tmp_path: Path
) -> None:
    effects = tmp_path / "effects"
    effects.touch()
    call = ToolCallReply("measure", {"what": "it"})
    model.follow(lambda _: Reply(tool_calls=(call,)))
    agents = {"STEPFLEET_AGENTS": str(FOLDER / "heavy_agents.py"), "EFFECTS": str(effects)}
    env = {**agents, "RENDER_SECONDS": "600"}
    worker = start_worker(options=("-Q", "stepfleet,gpu"), env=env)
    fleet.submit(HEAVY, "one")
    wait_until(effects.read_text, within=LONG, what="the tool under way")

    leases_run_out(redis_url)

    def is_over() -> bool:
        return "dropped: leased" in worker.log or effects.read_text().count("measure") > 1

    wait_until(is_over, within=LONG, what="the hint's refusal")
    assert effects.read_text().count("measure") == 1
