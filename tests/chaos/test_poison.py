"""Runs whose tool ends the worker process, among ordinary ones: each is given up after three.

The large run takes its sizes from `POISON_RUNS` and `POISONED`, and prints figures.
"""

import contextlib
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deadlines import wait_until
from load_fleet import LoadFleet, load_fleet
from redis_servers import RedisServer

from stepfleet.orchestrator import Batch
from stepfleet.orchestrator.loading_agents import load_agents
from stepfleet.orchestrator.records.results import AgentRunResult
from stepfleet.worker.testing import ModelServer, Reply, RequestRecord, ToolCallReply

AGENTS = Path(__file__).parent / "agents" / "poison_agents.py"
HANDY = load_agents(str(AGENTS))["handy"]
LIMIT = 3
# A process of its own takes seconds to start; its worker may die meanwhile, and renew no more.
SHORT_TERMS = {"STEPFLEET_LEASE": "6", "STEPFLEET_GRACE": "1", "STEPFLEET_SLOTS": "6"}
Play = Callable[[int, int], None]


def script(request: RequestRecord) -> Reply:
    """Look, then use the tool that the key names, then answer."""
    tool = "die" if request.key.startswith("poison") else "look"
    turns = {1: ("look",), 2: (tool,)}
    asked = turns.get(request.turn, ())
    calls = tuple(ToolCallReply(name, {"what": request.key}) for name in asked)
    content = None if calls else f"answer to {request.key}"
    return Reply(content, tool_calls=calls, latency=0.05)


class Nurse:
    """Starts a worker for each that ends, until it is told to stop."""

    def __init__(self, load: LoadFleet) -> None:
        self.deaths = 0
        self._load = load
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(timeout=60)

    def _run(self) -> None:
        while not self._ended.wait(0.1):
            self.deaths += self._load.replace_dead()


@pytest.fixture
def play(own_redis: Callable[..., RedisServer], effects: Path) -> Iterator[Play]:
    """Run `poisoned` runs among `runs` ordinary ones; assert that each got what it deserves."""
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(ModelServer(script))
        env = {"EFFECTS": str(effects), **SHORT_TERMS}
        load = stack.enter_context(load_fleet(own_redis(), model, AGENTS, **env))

        def played(poisoned: int, runs: int) -> None:
            keys = [f"poison {number}" for number in range(poisoned)]
            healthy = [f"healthy {number}" for number in range(runs)]
            step = max(runs // poisoned, 1)
            for number in range(poisoned):
                healthy.insert(number * (step + 1), keys[number])
            began = time.monotonic()
            load.start(count=2)
            nurse = Nurse(load)
            stack.callback(nurse.end)
            batch, _ = load.submit(HANDY, healthy)
            batch.wait(timeout=60 + 15 * poisoned + runs / 10)
            nurse.end()
            check(batch, nurse, effects, poisoned, runs)
            sys.stdout.write(
                f"\n{poisoned} poisoned among {runs} runs: {time.monotonic() - began:.0f} s, "
                f"{nurse.deaths} workers ended, {batch.progress().lost} attempts lost\n"
            )

        yield played


def check(batch: Batch, nurse: Nurse, effects: Path, poisoned: int, runs: int) -> None:
    """Hold results, deaths and the tool's own notes against each other."""
    results = list(batch.results())
    bad = [one for one in results if str(one.line_id).startswith("poison")]
    assert len(bad) == poisoned
    for result in bad:
        gave_up(result)
    for result in results:
        if result not in bad:
            assert result.output == f"answer to {result.line_id}"
            assert [step.step for step in result.steps] == [1, 2, 3]
    assert len(results) == poisoned + runs
    died = Counter(effects.read_text().splitlines())
    assert died == {f"poison {number}": LIMIT for number in range(poisoned)}
    # Two may die in one process, before either has ended it.
    wait_until(lambda: nurse.deaths <= LIMIT * poisoned, within=5)


def gave_up(result: AgentRunResult) -> None:
    """Assert that a run was given up after three kills, and names step and tool."""
    assert result.stop_reason == "error"
    assert result.error == (
        f"step 2 ended its worker {LIMIT} times while tool die ran; it is not tried again"
    )
    assert len(result.steps) >= 1
    crashes = [one for one in result.lost_attempts if one.kind == "crash" and one.step == 2]
    assert len(crashes) == LIMIT


def test_poisoned_runs_end_after_three_kills_and_others_do_their_work(play: Play) -> None:
    """DIST-08: each names its step and tool; the runs beside them complete."""
    play(2, 40)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_many_poisoned_runs_end_after_three_kills(play: Play) -> None:
    """DIST-08: the same with many."""
    play(int(os.environ.get("POISONED", "20")), int(os.environ.get("POISON_RUNS", "2000")))
