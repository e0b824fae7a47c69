"""Runs whose tool ends the worker process, among ordinary ones: each is given up after three.

Half of them do it on a queue of tools, which the same workers serve, and so do some ordinary ones.

The large run takes its sizes from `POISON_RUNS` and `POISONED`, seconds of `POISON_LEASE`, and
prints figures.
"""

import contextlib
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.servers.redis_servers import RedisServer
from support.workers.load_fleet import load_fleet

from stepfleet.orchestrator import AgentRunResult, Batch
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

AGENTS = Path(__file__).parent / "agent_modules" / "poison_agents.py"
HANDY = load_agents(str(AGENTS))["handy"]
LIMIT = 3
SHORT_TERMS = {
    "STEPFLEET_LEASE": os.environ.get("POISON_LEASE", "6"),
    "STEPFLEET_GRACE": "1",
    "STEPFLEET_SLOTS": "6",
}
SERVES = ("-Q", "stepfleet,gpu")
TOOLS = {"poison": "die", "heavy poison": "burst", "healthy": "look", "heavy": "weigh"}
Play = Callable[[int, int], None]

# A busy machine takes several times as long as one that has nothing else to do.
pytestmark = pytest.mark.timeout(420)


def script(request: RequestRecord) -> Reply:
    """Look, then use the tool that the key names, then answer."""
    tool = TOOLS[" ".join(request.key.split()[:-1])]
    turns = {1: ("look",), 2: (tool,)}
    asked = turns.get(request.turn, ())
    calls = tuple(ToolCallReply(name, {"what": request.key}) for name in asked)
    content = None if calls else f"answer to {request.key}"
    return Reply(content, tool_calls=calls, latency=0.05)


@pytest.fixture
def play(own_redis: Callable[..., RedisServer], effects: Path) -> Iterator[Play]:
    """Run `poisoned` runs among `runs` ordinary ones; assert that each got what it deserves."""
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(ModelServer(script))
        env = {"EFFECTS": str(effects), **SHORT_TERMS}
        load = stack.enter_context(load_fleet(own_redis(), model, AGENTS, **env))

        def played(poisoned: int, runs: int) -> None:
            keys = [named(number, "poison", "heavy poison") for number in range(poisoned)]
            healthy = [named(number, "healthy", "heavy") for number in range(runs)]
            step = max(runs // poisoned, 1)
            for number in range(poisoned):
                healthy.insert(number * (step + 1), keys[number])
            began = time.monotonic()
            load.start(*SERVES, count=2)
            with load.nursed(*SERVES):
                batch, _ = load.submit(HANDY, healthy)
                batch.wait(timeout=240 + 15 * poisoned + runs / 10)
            check(batch, load.deaths, effects, poisoned, runs)
            sys.stdout.write(
                f"\n{poisoned} poisoned among {runs} runs: {time.monotonic() - began:.0f} s, "
                f"{load.deaths} workers ended, {batch.progress().lost} attempts lost\n"
            )

        yield played


def named(number: int, even: str, odd: str) -> str:
    """Return the key of a run, of one kind or the other."""
    return f"{odd if number % 2 else even} {number}"


def check(batch: Batch, deaths: int, effects: Path, poisoned: int, runs: int) -> None:
    """Hold results, deaths and the tool's own notes against each other."""
    results = list(batch.results())
    bad = [one for one in results if "poison" in str(one.line_id)]
    assert len(bad) == poisoned
    for result in bad:
        gave_up(result)
    for result in results:
        if result not in bad:
            told = (result.error, result.lost_attempts)
            assert result.output == f"answer to {result.line_id}", told
            assert [step.step for step in result.steps] == [1, 2, 3]
    assert len(results) == poisoned + runs
    died = Counter(effects.read_text().splitlines())
    assert died == {str(result.line_id): LIMIT for result in bad}
    # Two may die in one process, before either has ended it.
    assert 0 < deaths <= LIMIT * poisoned


def gave_up(result: AgentRunResult) -> None:
    """Assert that a run was given up after three kills, and names step and tool."""
    assert result.stop_reason == "error"
    heavy = str(result.line_id).startswith("heavy")
    what = "tool 'burst'" if heavy else "step 2"
    while_ = "" if heavy else " while tool die ran"
    assert result.error is not None
    told = rf".*{what} ended its worker (\d+) times{while_}; it is not tried again"
    found = re.fullmatch(told, result.error)
    assert found, result.error
    times = int(found[1])  # one that died on the way to the trial is counted here as well
    assert len(result.steps) >= 1
    crashes = [one for one in result.lost_attempts if one.kind == "crash" and one.step == 2]
    assert len(crashes) >= times >= LIMIT


def test_poisoned_runs_end_after_three_kills_and_others_do_their_work(play: Play) -> None:
    """DIST-08: each names its step and tool; the runs beside them complete."""
    play(2, 40)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_many_poisoned_runs_end_after_three_kills(play: Play) -> None:
    """DIST-08: the same with many."""
    play(int(os.environ.get("POISONED", "20")), int(os.environ.get("POISON_RUNS", "2000")))
