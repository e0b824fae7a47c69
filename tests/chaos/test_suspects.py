"""Runs that lose their workers and are not to blame, and runs that are, unseen by any journal.

The large runs take their sizes from `SUSPECT_RUNS`, `SUSPECT_KILLS`, seconds of `SUSPECT_LEASE` and
`SUSPECT_LATENCY`, and print figures.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.deadlines import wait_until
from support.servers.redis_servers import RedisServer
from support.workers.fleet_workers import FleetWorker
from support.workers.load_fleet import LoadFleet, load_fleet

from stepfleet.orchestrator import Batch
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

AGENTS = Path(__file__).parent / "agent_modules" / "poison_agents.py"
LOADED = load_agents(str(AGENTS))
HANDY, FRAIL = LOADED["handy"], LOADED["frail"]
TRIED = "are executed in an isolated process"
SLACK = 20.0
Open = Callable[..., LoadFleet]

# A busy machine takes several times as long as one that has nothing else to do.
pytestmark = pytest.mark.timeout(420)


def answers_after(seconds: float) -> Callable[[RequestRecord], Reply]:
    """Return rules that answer each question after so long."""

    def answer(request: RequestRecord) -> Reply:
        return Reply(f"answer to {request.key}", latency=seconds)

    return answer


def dies(request: RequestRecord) -> Reply:
    """Have the tool end its process where the key says so."""
    if request.turn == 1 and request.key.startswith("poison"):
        return Reply(None, tool_calls=(ToolCallReply("die", {"what": request.key}),), latency=0.05)
    return Reply(f"answer to {request.key}", latency=0.05)


@pytest.fixture
def open_fleet(own_redis: Callable[..., RedisServer], effects: Path) -> Iterator[Open]:
    """Open a fleet on a model of those rules; settings are STEPFLEET_ ones without the prefix."""
    with contextlib.ExitStack() as stack:

        def opened(rules: Callable[[RequestRecord], Reply], **settings: str) -> LoadFleet:
            model = stack.enter_context(ModelServer(rules))
            env = {f"STEPFLEET_{name}": value for name, value in settings.items()}
            env |= {"EFFECTS": str(effects), "PYTHONPATH": str(AGENTS.parent)}
            made = load_fleet(own_redis(), model, AGENTS, **env)
            return stack.enter_context(made)

        yield opened


def held(load: LoadFleet) -> Counter[str]:
    """Return how many runs each worker holds, by its name."""
    with load.client() as client:
        keys = [key for key in client.scan_iter("sf:{s*}:run:*", 1000) if key.count(":") == 3]
        asking = client.pipeline(transaction=False)
        for key in keys:
            asking.hmget(key, "worker", "token")
        told = asking.execute()
    return Counter(worker for worker, token in told if token)


def in_flight(load: LoadFleet, runs: int, batch: Batch) -> bool:
    """Tell whether the newest worker has taken everything that has not ended."""
    asked = Counter(request.key for request in load.model.requests)
    mine = held(load)[load.workers[-1].name]
    return mine + batch.progress().done >= runs and len(asked) == runs


def at_work(load: LoadFleet) -> list[FleetWorker]:
    """Return the living workers that hold runs, the busiest first."""
    shares = held(load)
    workers = [one for one in load.workers if shares[one.name]]
    return sorted(workers, key=lambda one: -shares[one.name])


def kill(worker: FleetWorker, load: LoadFleet) -> None:
    worker.signal(signal.SIGKILL)
    worker.wait()
    load.workers.remove(worker)


def loses_two_workers(load: LoadFleet, runs: int) -> float:
    """Kill twice whoever has all runs; return seconds from the first kill to the last end."""
    load.start()
    logs = [load.workers[-1]]
    batch, _ = load.submit(HANDY, [f"run {n}" for n in range(runs)])
    began = 0.0
    for _ in range(2):
        wait_until(lambda: in_flight(load, runs, batch), within=120, what="all in flight")
        kill(load.workers[-1], load)
        began = began or time.monotonic()
        load.start()
        logs.append(load.workers[-1])
    batch.wait(timeout=300)
    took = time.monotonic() - began
    assert batch.progress().completed == runs
    assert not any(TRIED in worker.log for worker in logs)
    return took


def test_a_model_call_that_lost_two_workers_is_merely_repeated(open_fleet: Open) -> None:
    """DIST-08: two kills from outside make nobody wait for a process of its own."""
    loses_two_workers(open_fleet(answers_after(4.0), LEASE="3", GRACE="1"), 30)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_many_model_calls_that_lost_two_workers_end_within_the_bound(open_fleet: Open) -> None:
    """DIST-08: call time, two leases and 20 s, for a thousand runs."""
    runs, lease = int(os.environ.get("SUSPECT_RUNS", "1000")), os.environ.get("SUSPECT_LEASE", "10")
    latency = float(os.environ.get("SUSPECT_LATENCY", "20"))
    load = open_fleet(answers_after(latency), LEASE=lease, SLOTS=str(runs))
    took = loses_two_workers(load, runs)
    bound = latency + 2 * float(lease) + SLACK
    sys.stdout.write(f"\n{runs} runs, two kills: {took:.1f} s, bound {bound:.1f} s\n")
    assert took < bound


def kills_from_outside(load: LoadFleet, runs: int, kills: int, every: float) -> None:
    """Kill a worker every so often, and replace it; all runs are innocent and complete."""
    load.start(count=3)
    batch, _ = load.submit(HANDY, [f"run {n}" for n in range(runs)])
    pause = threading.Event()
    for _ in range(kills):
        wait_until(lambda: at_work(load) or batch.progress().ended, within=120, what="work")
        for victim in at_work(load)[:1]:
            victim.signal(signal.SIGKILL)
            victim.wait()
        load.replace_dead()
        pause.wait(every)
    batch.wait(timeout=600)
    failed = [one.error for one in batch.results(follow=False) if not one.success]
    sys.stdout.write(f"\n{kills} kills, {runs} runs: {batch.progress().lost} attempts lost\n")
    assert not failed


def test_nobody_is_given_up_for_kills_from_outside(open_fleet: Open) -> None:
    """DIST-08: a process for suspects that ends with its worker proves nothing."""
    load = open_fleet(answers_after(3.0), LEASE="1", GRACE="0.3", RESCUE_INTERVAL="0.2")
    kills_from_outside(load, 12, 6, 0.2)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_nobody_is_given_up_for_many_kills_from_outside(open_fleet: Open) -> None:
    """DIST-08: the same with many."""
    load = open_fleet(answers_after(3.0), LEASE="2", GRACE="1")
    runs = int(os.environ.get("SUSPECT_RUNS", "200"))
    kills_from_outside(load, runs, int(os.environ.get("SUSPECT_KILLS", "15")), 1.0)


def given_up(batch: Batch) -> None:
    """Assert that the poisoned run alone is given up."""
    for result in batch.results():
        if str(result.line_id).startswith("poison"):
            assert result.stop_reason == "error"
            assert "ended its worker" in str(result.error)
        else:
            assert result.output == f"answer to {result.line_id}", result.error


def test_under_prefork_a_run_that_ends_its_children_is_given_up(
    open_fleet: Open, effects: Path
) -> None:
    """DIST-08: the parent sees each death; its other children go on."""
    load = open_fleet(dies, LEASE="60", GRACE="1", SLOTS="2")
    load.start("--pool", "prefork", "--concurrency", "2")
    batch, _ = load.submit(HANDY, ["poison", *(f"run {n}" for n in range(6))])
    batch.wait(timeout=300)
    given_up(batch)
    assert effects.read_text().splitlines() == ["poison"] * 3
    assert load.workers[0].exit_code is None


def test_a_run_whose_own_code_ends_workers_is_found_among_others(
    open_fleet: Open, effects: Path
) -> None:
    """DIST-08: no journal tells what it does; groups are divided until it dies alone."""
    load = open_fleet(answers_after(1.0), LEASE="2", GRACE="0.5", RESCUE_INTERVAL="0.2")
    load.start()
    with load.nursed():
        batch, _ = load.submit(FRAIL, ["poison", *(f"run {n}" for n in range(9))])
        batch.wait(timeout=300)
    given_up(batch)
    assert load.deaths <= 3
    assert len(effects.read_text().splitlines()) <= 6
