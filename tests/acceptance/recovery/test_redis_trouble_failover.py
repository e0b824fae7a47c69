"""Real workers behind real Sentinels: the master goes away, another takes over, runs go on."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.deadlines import wait_until
from support.servers.sentinel_fleet import SentinelFleet, sentinel_fleet
from support.workers.busy_runs import NO_LIMITS, Busy
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Fleet, RunStatus
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.server import ModelServer

LONG = 60.0
Start = Callable[..., FleetWorker]
AGENTS = load_agents(str(Path(__file__).parents[1] / "agent_modules" / "agents.py"))
TURNS = 3
RUNS = 40
SMALL = {"STEPFLEET_SLOTS": "8", "STEPFLEET_LEASE": "2"}


@pytest.fixture
def redis_fleet() -> Iterator[SentinelFleet]:
    with sentinel_fleet(requirepass="geheim") as found:
        yield found


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "transport"), [("kill", "batch"), ("kill", "stock"), ("freeze", "batch")]
)
def test_workers_go_on_with_the_new_master(
    how: str,
    transport: str,
    redis_fleet: SentinelFleet,
    start_worker: Start,
    model: ModelServer,
    effects: Path,
) -> None:
    """Store, broker and client find it by themselves; the worker says its wait once."""
    busy = Busy("effect", turns=TURNS, latency=0.2)
    model.follow(busy)
    env = {"EFFECTS": str(effects), "STEPFLEET_TRANSPORT": transport, **SMALL}
    worker = start_worker(redis_fleet.url, env=env)
    with Fleet(redis_fleet.url) as fleet:
        batch = fleet.submit_batch(
            [{"id": f"r{n}", "input": f"question {n}"} for n in range(RUNS)],
            agent=AGENTS["plain"],
            **NO_LIMITS,
        )
        wait_until(lambda: batch.progress().steps >= 15, within=LONG, what="some steps")
        assert batch.progress().open == RUNS
        former = redis_fleet.master
        former.kill() if how == "kill" else former.freeze()
        busy.struck.set()
        results = list(batch.results())
    assert redis_fleet.master is not former
    assert {result.status for result in results} == {RunStatus.COMPLETED}
    for result in results:
        assert [step.step for step in result.steps] == list(range(1, len(result.steps) + 1))
        assert result.output == f"answer to question {str(result.line_id)[1:]}"
    assert worker.exit_code is None
    assert 1 <= worker.log.count("waiting for it") <= 2
    assert "geheim" not in worker.log


@pytest.mark.long
def test_runs_go_on_from_what_redis_has_when_a_failover_lost_commits(
    redis_fleet: SentinelFleet, start_worker: Start, model: ModelServer, effects: Path
) -> None:
    """Acknowledged commits that the replica never got are made again, and so are their calls."""
    busy = Busy("effect", turns=TURNS, latency=0.2)
    model.follow(busy)
    start_worker(redis_fleet.url, env={"EFFECTS": str(effects), **SMALL})
    with Fleet(redis_fleet.url) as fleet:
        batch = fleet.submit_batch(
            [{"id": f"r{n}", "input": f"question {n}"} for n in range(RUNS)],
            agent=AGENTS["plain"],
            **NO_LIMITS,
        )
        wait_until(lambda: batch.progress().steps >= 15, within=LONG, what="some steps")
        former = redis_fleet.master
        with redis_fleet.client(redis_fleet.replica) as client:
            client.config_set("masterauth", "outdated")
        with redis_fleet.client(former) as client:
            client.client_kill_filter(_type="replica")
        copied = batch.progress().steps
        wait_until(lambda: batch.progress().steps >= copied + 30, within=LONG, what="more steps")
        assert batch.progress().open == RUNS
        former.kill()
        busy.struck.set()
        results = list(batch.results())
        assert {result.status for result in results} == {RunStatus.COMPLETED}
        for result in results:
            assert [step.step for step in result.steps] == list(range(1, len(result.steps) + 1))
            assert result.output == f"answer to question {str(result.line_id)[1:]}"
        steps = sum(len(result.steps) for result in results)
        assert batch.progress().steps == steps
    made = len(model.requests)
    assert made > steps + 15, "calls whose commits were lost are made again"
