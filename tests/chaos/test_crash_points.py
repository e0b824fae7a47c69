"""A worker process ends at every named point of a step: nothing is lost, nothing is done twice."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from uuid import uuid4

import pytest
import redis
from support.chaos.crash_cases import (
    CASES,
    LIMITED,
    CrashCase,
    check_calls,
    check_effects,
    script,
    shape,
    tool_results,
    unknown_calls,
)
from support.deadlines import wait_until
from support.servers.redis_servers import RedisServer
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import AgentRunResult, Batch, BudgetUse, Fleet
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.worker.runtime.crash_points import POINTS
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply
from stepfleet.worker.testing.server import ModelServer

Launch = Callable[..., FleetWorker]
AGENTS_FILE = Path(__file__).parent / "agent_modules" / "chaos_agents.py"
AGENTS = load_agents(str(AGENTS_FILE))

# A busy machine takes several times as long as one that has nothing else to do.
pytestmark = pytest.mark.timeout(420)

RUNS = 4
TOO_LATE = 600.0
BUDGETS = {"batch:*": {"calls": 10_000, "usd": 100}}
ONE_AT_A_TIME = {
    "STEPFLEET_SLOTS": "1",
    "STEPFLEET_LEASE": "2",
    "STEPFLEET_GRACE": "0.5",
    "STEPFLEET_RESCUE_INTERVAL": "0.2",
}
POOLS = {"asyncio": (), "prefork": ("-P", "prefork", "-c", "1")}
IN_THE_GATE = {
    ("asyncio", "script", "during-call:2"),
    ("asyncio", "script", "before-journal:2"),
    ("asyncio", "publish", "commit-applied:1"),
    ("asyncio", "publish", "rescue-saved:1"),
    ("asyncio", "script", "call-made:1-heavy"),
    ("asyncio", "publish", "tool-parked:1-heavy"),
    ("prefork", "script", "during-tool:1"),
    ("asyncio", "script", "step-put-back:1-answer"),
}
MATRIX = [
    pytest.param(
        pool,
        enqueue,
        case,
        id=f"{pool}-{enqueue}-{case}",
        marks=() if (pool, enqueue, str(case)) in IN_THE_GATE else pytest.mark.chaos,
    )
    for pool in POOLS
    for enqueue in ("script", "publish")
    for case in CASES
]


class Trial:
    """One batch of a fleet that meets with a fault, and the undisturbed fleet's results."""

    def __init__(self, model: ModelServer, effects: Path, reference: list[AgentRunResult]) -> None:
        self.effects = effects
        self._model = model
        self._reference = reference
        self._before = model.log.counts
        model.follow(script)

    def hold_answer(self, number: int, died: Path) -> None:
        """Let an answer take too long for a worker that dies while it waits for it."""
        requests = count(1)

        def rules(request: RequestRecord) -> Reply:
            held = next(requests) == number and not died.exists()
            reply = script(request)
            return replace(reply, latency=TOO_LATE) if held else reply

        self._model.follow(rules)

    @property
    def served(self) -> int:
        """How many calls the model server got."""
        return sum(self._model.log.counts.values()) - sum(self._before.values())

    def check(self, batch: Batch, results: list[AgentRunResult]) -> tuple[int, int, int]:
        """Assert that results equal the undisturbed ones; return crashes, repeats, unknown."""
        ids = {str(result.line_id) for result in results}
        reference = [one for one in self._reference if str(one.line_id) in ids]
        assert shape(results) == shape(reference)
        expected = tool_results(reference)
        for place, result in tool_results(results).items():
            assert result == expected[place], place
        check_effects(results, self.effects)
        calls = self._model.log.counts
        counts = {place: calls[place] - self._before.get(place, 0) for place in calls}
        repeats = check_calls(results, {one: one for one in ids}, counts)
        lost = [entry for result in results for entry in result.lost_attempts]
        assert all(one.cost_usd for one in lost if one.ambiguous), "a repeated call has no price"
        progress = batch.progress()
        assert progress.completed == RUNS
        assert progress.steps == sum(len(result.steps) for result in results)
        assert progress.tokens == sum(result.usage.total_tokens for result in results)
        assert progress.lost == len(lost)
        return sum(one.kind == "crash" for one in lost), repeats, unknown_calls(results)


def lines(work: str) -> list[dict[str, str]]:
    return [{"id": f"{work} {n}", "input": f"{work} {n}"} for n in range(RUNS)]


@pytest.fixture(scope="module")
def reference(
    model: ModelServer, tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer
) -> list[AgentRunResult]:
    """Return what a fleet does that nothing disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    model.follow(script)
    redis_server.flush()
    env = {
        "STEPFLEET_AGENTS": str(AGENTS_FILE),
        "EFFECTS": str(folder / "effects"),
    }
    queues = ("-Q", "stepfleet,heavy")
    worker = FleetWorker(folder, redis_server.url, model.url, env=env, options=queues).start()
    try:
        with Fleet(redis_server.url) as fleet:
            given = [*lines("work"), *lines("answer"), *lines("heavy")]
            results = list(fleet.submit_batch(given, agent=AGENTS["plain"]).results())
    finally:
        worker.end()
    assert not any(result.lost_attempts for result in results)
    return results


@pytest.fixture
def trial(model: ModelServer, effects: Path, reference: list[AgentRunResult]) -> Trial:
    return Trial(model, effects, reference)


def test_every_crash_point_has_a_case() -> None:
    assert {case.point for case in CASES} == set(POINTS)


def environment(case: CrashCase, enqueue: str) -> dict[str, str]:
    """Return a worker's variables: it does one step at a time, where the case wants it limited.

    Workers that publish hints themselves have budgets.
    """
    limits = BUDGETS if enqueue == "publish" else {}
    if case.point in LIMITED:
        limits = {**limits, "openai:*": {"requests_per_minute": 120}}
    return {
        **ONE_AT_A_TIME,
        "STEPFLEET_ENQUEUE": enqueue,
        "STEPFLEET_LIMITS": json.dumps(limits),
    }


def check_budget(fleet: Fleet, batch: Batch, served: int, most_lost: int) -> None:
    """Assert that nothing stays reserved, and that each call is spent once.

    Of calls that are lost with their worker nobody knows whether they were sent.
    """

    def use() -> tuple[BudgetUse, ...]:
        return next(one.budgets for one in fleet.limits.use() if one.name == f"batch:{batch.id}")

    wait_until(lambda: not any(one.reserved for one in use()), within=30, what="no reservation")
    calls = next(one.spent for one in use() if one.field == "calls")
    assert served <= calls <= served + most_lost


def submitted(fleet: Fleet, case: CrashCase, url: str) -> Batch:
    batch = fleet.submit_batch(lines(case.work), agent=AGENTS["plain"])
    if case.point == "rescue-saved":
        with redis.Redis.from_url(url) as client:
            assert client.delete("stepfleet") == 1
    return batch


@pytest.mark.parametrize(("pool", "enqueue", "case"), MATRIX)
def test_a_worker_that_dies_at_a_point_loses_nothing(
    pool: str,
    enqueue: str,
    case: CrashCase,
    trial: Trial,
    launch: Launch,
    redis_url: str,
    tmp_path: Path,
) -> None:
    """CONT-25, DIST-08, TOOL-26: only what lay between two records is done again, by another."""
    env = environment(case, enqueue)
    died = tmp_path / "died"
    trap = {"STEPFLEET_CRASH_AT": f"{case.point}:{case.visit}", "STEPFLEET_CRASH_ONCE": str(died)}
    if case.point == "during-call":
        trial.hold_answer(case.visit, died)
    with Fleet(settings=load_settings(redis_url=redis_url, enqueue=enqueue)) as fleet:
        batch = submitted(fleet, case, redis_url)
        victim = launch(redis_url, name="victim", options=POOLS[pool], env={**env, **trap})
        wait_until(died.exists, within=60, what=f"the death at {case}")
        if pool == "asyncio":
            assert victim.wait() == -signal.SIGKILL
            launch(redis_url, name="heir", env=env)
        else:
            assert "(prefork)" in victim.log
        batch.wait(timeout=60)
        crashes, repeats, unknown = trial.check(batch, list(batch.results()))
        if enqueue == "publish":
            check_budget(fleet, batch, trial.served, case.crashes)
    assert (crashes, repeats, unknown) == (case.crashes, case.repeats, case.unknown)


def test_a_run_that_loses_two_workers_has_no_failure_of_its_agent(
    model: ModelServer, launch: Launch, redis_url: str, tmp_path: Path
) -> None:
    """ERR-29: killed with its answer in their hands; its first step stays its first."""
    model.follow(script)
    with Fleet(redis_url) as fleet:
        run_id = fleet.submit(AGENTS["plain"], "answer twice")
        for name in ("first", "second"):
            died = tmp_path / name
            trap = {"STEPFLEET_CRASH_AT": "after-reply", "STEPFLEET_CRASH_ONCE": str(died)}
            victim = launch(redis_url, name=name, env={**ONE_AT_A_TIME, **trap})
            wait_until(died.exists, within=60, what=f"the death of the {name}")
            assert victim.wait() == -signal.SIGKILL
        launch(redis_url, name="heir", env=ONE_AT_A_TIME)
        result = fleet.runs.wait(run_id, timeout=60)
        failures = fleet.runs.show(run_id).state.failures
    assert (result.success, [step.step for step in result.steps]) == (True, [1])
    assert [lost.kind for lost in result.lost_attempts] == ["crash", "crash"]
    assert (failures.consecutive_failures, failures.total_failures) == (0, 0)


SUBMITTER = """
import sys
from stepfleet.orchestrator import Fleet
from stepfleet.orchestrator.agents.loader import load_agents
store, broker, agents, run_id = sys.argv[1:]
with Fleet(store, broker_url=broker) as fleet:
    fleet.submit(load_agents(agents)["plain"], "answer 0", run_id=run_id)
"""


def test_a_run_whose_submitter_dies_between_save_and_publish_is_done(
    trial: Trial, launch: Launch, redis_url: str
) -> None:
    """DIST-06, DIST-10: its broker takes connections and never answers, until it is killed."""
    run_id = str(uuid4())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        broker = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        submitter = subprocess.Popen(
            [sys.executable, "-c", SUBMITTER, redis_url, broker, str(AGENTS_FILE), run_id]
        )
        try:
            with redis.Redis.from_url(redis_url) as client:
                saved = f"sf:*:run:{run_id}"
                wait_until(lambda: list(client.scan_iter(saved)), within=60, what="the run")
                assert submitter.poll() is None
        finally:
            submitter.kill()
            assert submitter.wait() == -signal.SIGKILL
    launch(redis_url, name="worker", env={**ONE_AT_A_TIME, "STEPFLEET_ENQUEUE": "publish"})
    with Fleet(redis_url) as fleet:
        assert fleet.runs.wait(run_id, timeout=60).output == "answer to answer 0"


@pytest.mark.chaos
@pytest.mark.parametrize("enqueue", ["script", "publish"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_worker_that_sleeps_at_a_point_past_its_lease_commits_nothing_twice(
    case: CrashCase, enqueue: str, trial: Trial, launch: Launch, redis_url: str, tmp_path: Path
) -> None:
    """DIST-05: it wakes up when another worker has finished its runs, and writes nothing more."""
    env = environment(case, enqueue)
    slept = tmp_path / "slept"
    trap = {
        "STEPFLEET_CRASH_AT": f"{case.point}:{case.visit}",
        "STEPFLEET_CRASH_ONCE": str(slept),
        "STEPFLEET_CRASH_BY": "SIGSTOP",
    }
    with Fleet(settings=load_settings(redis_url=redis_url, enqueue=enqueue)) as fleet:
        batch = submitted(fleet, case, redis_url)
        sleeper = launch(redis_url, name="sleeper", env={**env, **trap})
        wait_until(slept.exists, within=60, what=f"the sleep at {case}")
        launch(redis_url, name="heir", env=env)
        batch.wait(timeout=60)
        asleep = [result.to_json() for result in batch.results(ordered=True)]
        sleeper.signal(signal.SIGCONT)
        late = fleet.submit(AGENTS["plain"], "answer late")
        wait_until(lambda: "succeeded" in sleeper.log, within=60, what="the sleeper at work again")
        fleet.runs.wait(late, timeout=60)
        sleeper.signal(signal.SIGTERM)
        sleeper.wait()
        results = list(batch.results(ordered=True))
        committed = [one.model_copy(update={"lost_attempts": ()}) for one in results]
        assert committed == [
            AgentRunResult.from_json(one).model_copy(update={"lost_attempts": ()}) for one in asleep
        ]
        trial.check(batch, results)


@pytest.mark.chaos
@pytest.mark.parametrize("enqueue", ["script", "publish"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_redis_dies_while_a_worker_is_at_a_point(
    case: CrashCase,
    enqueue: str,
    trial: Trial,
    launch: Launch,
    own_redis: Callable[..., RedisServer],
    tmp_path: Path,
) -> None:
    """DIST-12: with appendfsync always nothing that was acknowledged is lost."""
    server = own_redis(appendfsync="always")
    slept = tmp_path / "slept"
    trap = {
        "STEPFLEET_CRASH_AT": f"{case.point}:{case.visit}",
        "STEPFLEET_CRASH_ONCE": str(slept),
        "STEPFLEET_CRASH_BY": "SIGSTOP",
    }
    env = {**environment(case, enqueue), **trap}
    with Fleet(settings=load_settings(redis_url=server.url, enqueue=enqueue)) as fleet:
        batch = submitted(fleet, case, server.url)
        worker = launch(server.url, name="worker", env=env)
        wait_until(slept.exists, within=60, what=f"the sleep at {case}")
        server.kill()
        server.start()
        worker.signal(signal.SIGCONT)
        batch.wait(timeout=60)
        trial.check(batch, list(batch.results()))
