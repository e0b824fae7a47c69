"""A broker that is wiped while many runs wait, loses messages and delivers some twice.

The large runs take their sizes from `WIPED_RUNS` and `WAITING_RUNS`, and print figures.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import redis
from support.chaos.courier import READ, Courier
from support.chaos.plan import SHORT
from support.chaos.recount import Recount, await_upkeep, recount
from support.chaos.run import scripted
from support.deadlines import wait_until
from support.servers.redis_servers import RedisServer
from support.workers.load_fleet import LoadFleet, load_fleet

from stepfleet.orchestrator import Batch
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.server import ModelServer
from stepfleet.worker.testing.service import RequestLog

AGENTS = Path(__file__).parent / "agent_modules" / "chaos_agents.py"
PLAIN = load_agents(str(AGENTS))["plain"]
MOST_STALE = 0.2
Open = Callable[..., LoadFleet]

# A busy machine takes several times as long as one that has nothing else to do.
pytestmark = pytest.mark.timeout(420)


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    return tmp_path / "calls.jsonl"


@pytest.fixture
def opened(own_redis: Callable[..., RedisServer], calls: Path, effects: Path) -> Iterator[Open]:
    """Open a fleet on a Redis of its own, with a model of the given latency."""
    with contextlib.ExitStack() as stack:

        def make(latency: float, **env: str) -> LoadFleet:
            log = RequestLog(keep=0, path=calls)
            model = stack.enter_context(ModelServer(scripted(latency), log=log))
            given = {"EFFECTS": str(effects), **env}
            return stack.enter_context(load_fleet(own_redis(), model, AGENTS, **given))

        yield make


def has_ended(batch: Batch, share: float) -> bool:
    progress = batch.progress()
    return progress.done >= share * progress.total


def play(load: LoadFleet, runs: int, wipes: int, within: float) -> tuple[Courier, Batch, list[str]]:
    """Let `runs` wait, and wipe the broker each time a further part of them has ended."""
    keys = [f"{SHORT} {number}" for number in range(runs)]
    with Courier(load.server.url, 1, lost=0.1, twice=0.3, ahead=200) as courier:
        batch, _ = load.submit(PLAIN, keys)
        courier.wipe()  # nobody has begun: all messages are there, however fast the workers are
        load.start("-Q", READ, count=2)
        for number in range(1, wipes):
            wait_until(partial(has_ended, batch, number / wipes), within=within, what="progress")
            courier.wipe()
        batch.wait(timeout=within)
    return courier, batch, keys


def check(load: LoadFleet, courier: Courier, counted: Recount, seconds: float) -> None:
    """Assert that nothing was lost, and few deliveries were in vain; print figures."""
    sent_twice = courier.counts["twice"] - courier.counts["wiped twice"]
    stale = max(load.dropped() - sent_twice, 0)
    sys.stdout.write(
        f"\n{counted.runs} runs, {counted.steps} steps in {seconds:.0f} s: "
        f"{dict(counted.statuses)}; messages {dict(courier.counts)}; dropped {load.dropped()}, "
        f"but for those sent twice {stale} ({stale / counted.steps:.1%} of steps); "
        f"ledger {dict(counted.ledger)}, violations {len(counted.violations)}\n"
    )
    assert not counted.violations, counted.violations[:20]
    assert set(counted.statuses) == {"completed"}
    assert courier.counts["lost"]
    assert courier.counts["wiped"] > counted.runs // 2
    assert stale <= MOST_STALE * counted.steps


def wiped_again_and_again(opened: Open, calls: Path, effects: Path, runs: int, wipes: int) -> None:
    load = opened(0.02, STEPFLEET_GRACE="1")
    began = time.monotonic()
    courier, _, keys = play(load, runs, wipes, within=200 + runs / 50)
    seconds = time.monotonic() - began
    with load.client() as client:
        await_upkeep(client)
        counted = recount(client, calls, effects, keys)
    check(load, courier, counted, seconds)


def test_a_broker_that_is_wiped_again_and_again_loses_no_run(
    opened: Open, calls: Path, effects: Path
) -> None:
    """DIST-04, DIST-10: of 100 messages 10 are lost and 30 come twice; few are for nothing."""
    wiped_again_and_again(opened, calls, effects, 400, wipes=3)


def test_messages_that_all_come_twice_change_nothing(
    opened: Open, calls: Path, effects: Path
) -> None:
    """DIST-04: those of later steps as well; each step is done as if its message came once."""
    load = opened(0.02)
    keys = [f"{SHORT} {number}" for number in range(40)]
    with Courier(load.server.url, 1, lost=0.0, twice=1.0, ahead=200) as courier:
        batch, _ = load.submit(PLAIN, keys)
        load.start("-Q", READ, count=2)
        batch.wait(timeout=200)
    with load.client() as client:
        await_upkeep(client)
        counted = recount(client, calls, effects, keys)
    assert not counted.violations, counted.violations[:20]
    assert counted.statuses == {"completed": len(keys)}
    assert set(courier.counts) == {"twice"}
    assert courier.counts["twice"] >= counted.steps > len(keys)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_a_large_broker_that_is_wiped_loses_no_run(
    opened: Open, calls: Path, effects: Path
) -> None:
    """The same with many runs."""
    runs = int(os.environ.get("WIPED_RUNS", "50000"))
    wiped_again_and_again(opened, calls, effects, runs, wipes=10)


def put_off_further(client: "redis.Redis") -> None:
    """Let all runs be looked at in an hour, so that whoever comes soon was not merely due."""
    asked = client.pipeline(transaction=False)
    for shard in range(16):
        due = f"sf:{{s{shard:02d}}}:due"
        for run_id in client.zrange(due, 0, -1):
            asked.zincrby(due, 3_600_000, str(run_id))
    asked.execute()


def lost_while_waiting(opened: Open, runs: int, within: float, **env: str) -> None:
    """Wipe the broker when the rescuer has put off every run that waits; time their return."""
    load = opened(0.05, **env)
    keys = [f"{SHORT} {number}" for number in range(runs)]
    batch, _ = load.submit(PLAIN, keys)
    # Nobody consumes the steps' queue yet, so that all wait; a rescuer is in every worker.
    load.start("-Q", "elsewhere")
    wait_until(lambda: load.put_off() == runs, within=200, what="all runs put off")
    with load.client() as client:
        assert client.llen("stepfleet") == runs
        put_off_further(client)
        client.delete("stepfleet", "unacked", "unacked_index")
    wiped = time.monotonic()
    load.start("-Q", "stepfleet")
    ready = time.monotonic()
    wait_until(lambda: not batch.progress().queued, within=within, what="all runs at work again")
    begun = time.monotonic()
    batch.wait(timeout=within)
    ended = time.monotonic()
    sys.stdout.write(
        f"\n{runs} runs were wiped: all at work again {begun - wiped:.1f} s later "
        f"({begun - ready:.1f} s after the worker was there), ended after {ended - wiped:.1f} s\n"
    )
    assert batch.progress().completed == runs


def test_runs_that_waited_in_a_lost_queue_are_at_work_again_soon(opened: Open) -> None:
    """DIST-10: they were put off while the queue was long; an empty one brings them back."""
    lost_while_waiting(opened, 200, within=100)


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_many_runs_that_waited_in_a_lost_queue_are_at_work_again_soon(opened: Open) -> None:
    """DIST-10: 5,000 of them and the default terms; a minute."""
    runs = int(os.environ.get("WAITING_RUNS", "5000"))
    terms = {"LEASE": "30", "GRACE": "5", "RESCUE_INTERVAL": "2", "SLOTS": "1000"}
    env = {f"STEPFLEET_{name}": value for name, value in terms.items()}
    lost_while_waiting(opened, runs, within=60 * max(1, runs / 5000), **env)
