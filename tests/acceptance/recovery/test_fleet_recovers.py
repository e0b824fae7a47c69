"""Fleets of real workers under faults: every run ends, each step is committed once."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from support.deadlines import wait_until
from support.servers.redis_servers import RedisServer
from support.workers.busy_runs import NO_LIMITS, Busy
from support.workers.fleet_workers import FleetWorker
from support.workers.frozen import freeze

from stepfleet.orchestrator import AgentRunResult, Fleet, RunStatus, UsageStats
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Faults, Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

LONG = 60.0
Start = Callable[..., FleetWorker]
Hold = Callable[..., tuple[threading.Event, threading.Event]]
AGENTS = load_agents(str(Path(__file__).parents[1] / "agent_modules" / "agents.py"))
TURNS = 4
QUICK = {"STEPFLEET_LEASE": "2"}


def busy(request: RequestRecord) -> Reply:
    """One effect per turn, then an answer that tells the conversation's key."""
    if request.turn < TURNS:
        call = ToolCallReply("effect", {"what": f"{request.key}/{request.turn}"})
        return Reply(tool_calls=(call,), latency=0.02)
    return Reply(f"answer to {request.key}", latency=0.02)


def lines(count: int) -> list[dict[str, Any]]:
    return [{"id": f"r{n}", "input": f"question {n}"} for n in range(count)]


def check_all(results: list[AgentRunResult], effects: Path, most: int = TURNS) -> None:
    """Every run is complete, without a gap, and its effects happened once.

    A call that a lost worker had started is not run again, and counts as unknown.
    """
    unknown = calls = 0
    for result in results:
        assert result.status is RunStatus.COMPLETED, result.summary()
        assert [step.step for step in result.steps] == list(range(1, len(result.steps) + 1))
        assert TURNS <= len(result.steps) <= most
        assert result.output == f"answer to question {str(result.line_id)[1:]}"
        used = [step.usage for step in result.steps if step.usage]
        assert sum((one for one in used), UsageStats()) == result.usage
        calls += len(result.steps) - 1
        unknown += sum(call.is_error for step in result.steps for call in step.tool_calls)
    done = Counter(line.split()[2] for line in effects.read_text().splitlines())
    assert set(done.values()) == {1}
    assert calls - unknown <= len(done) <= calls


@pytest.mark.parametrize("pool", ["asyncio", "prefork", "threads", "solo"])
def test_every_pool_runs_the_same_task(
    pool: str, model: ModelServer, start_worker: Start, fleet: Fleet, effects: Path
) -> None:
    """DIST-01, LLM-07: tasks per run equal steps, whatever the pool; no worker may go online."""
    model.follow(busy)
    options = () if pool == "asyncio" else ("-P", pool, "-c", "4")
    worker = start_worker(options=options, env={"EFFECTS": str(effects)})
    assert psutil.Process(worker.pid).environ()["STEPFLEET_ALLOW_MODEL_REQUESTS"] == "0"
    batch = fleet.submit_batch(lines(12), agent=AGENTS["plain"])
    results = list(batch.results())
    check_all(results, effects)
    assert len(model.requests) == 12 * TURNS
    assert batch.progress().steps == 12 * TURNS


def test_hints_published_after_the_commit_work_as_well(
    model: ModelServer, start_worker: Start, fleet: Fleet, effects: Path
) -> None:
    """DIST-06: as with another broker than the store."""
    model.follow(busy)
    start_worker(env={"EFFECTS": str(effects), "STEPFLEET_ENQUEUE": "publish"})
    check_all(list(fleet.submit_batch(lines(12), agent=AGENTS["plain"]).results()), effects)


def test_kombus_own_transport_works_as_well(
    model: ModelServer, start_worker: Start, fleet: Fleet, effects: Path
) -> None:
    model.follow(busy)
    start_worker(env={"EFFECTS": str(effects), "STEPFLEET_TRANSPORT": "stock"})
    check_all(list(fleet.submit_batch(lines(12), agent=AGENTS["plain"]).results()), effects)


def test_faults_of_the_model_cost_retries_and_no_run(
    model: ModelServer, start_worker: Start, fleet: Fleet, effects: Path
) -> None:
    """ERR-22: transient failures are tried again as the same step."""
    model.follow(busy)
    model._service.faults = Faults(rate=0.2, first_attempts=2, retry_after=0.1)
    for name in ("w1", "w2"):
        start_worker(name=name, env={"EFFECTS": str(effects)})
    results = list(fleet.submit_batch(lines(30), agent=AGENTS["plain"]).results())
    check_all(results, effects)
    assert any(lost.kind == "deferred" for result in results for lost in result.lost_attempts)


def test_runs_of_a_killed_worker_are_finished_by_another(
    start_worker: Start, fleet: Fleet, effects: Path, hold: Hold
) -> None:
    """DIST-08, DIST-11, TOOL-26, CKPT-14, MSG-18, RUN-09: the server refuses unanswered calls."""
    asked, killed = hold(busy, 2)
    env = {"EFFECTS": str(effects)}
    victim = start_worker(name="victim", env={**env, **QUICK})
    batch = fleet.submit_batch(lines(160), agent=AGENTS["plain"])
    assert asked.wait(LONG), "nobody asked for a second turn"
    victim.signal(signal.SIGKILL)
    killed.set()
    start_worker(name="heir", env=env)
    results = list(batch.results())
    check_all(results, effects)
    assert any(lost.kind == "crash" for result in results for lost in result.lost_attempts)


def test_a_worker_that_slept_past_its_lease_commits_nothing(
    start_worker: Start, fleet: Fleet, effects: Path, hold: Hold
) -> None:
    """DIST-05: the answers that it has asked for are there when it wakes up."""
    asleep_in_turn, asleep = hold(busy, 2)
    env = {"EFFECTS": str(effects)}
    sleeper = start_worker(name="sleeper", env={**env, **QUICK})
    batch = fleet.submit_batch(lines(20), agent=AGENTS["plain"])
    assert asleep_in_turn.wait(LONG), "nobody asked for a second turn"
    freeze(sleeper.pid)
    asleep.set()
    start_worker(name="heir", env=env)
    results = list(batch.results())
    assert any(lost.kind == "crash" for result in results for lost in result.lost_attempts)
    sleeper.signal(signal.SIGCONT)
    sleeper.signal(signal.SIGTERM)
    assert sleeper.wait(within=LONG) == 0
    for result in results:
        assert fleet.runs.result(result.run_id).steps == result.steps
    check_all(results, effects)
    progress = batch.progress()
    assert progress.completed == 20
    assert progress.steps == 20 * TURNS
    assert all(len(result.steps) == TURNS for result in results)


def test_every_step_of_a_run_may_be_in_a_process_of_its_own(
    model: ModelServer, start_worker: Start, fleet: Fleet, effects: Path
) -> None:
    """DIST-11: no process knows more than one step, and every result and sum is right."""
    model.follow(busy)
    options = ("-P", "prefork", "-c", "2", "--max-tasks-per-child", "1")
    start_worker(options=options, env={"EFFECTS": str(effects)})
    batch = fleet.submit_batch(lines(3), agent=AGENTS["plain"])
    results = list(batch.results())
    check_all(results, effects)
    for result in results:
        assert len({step.worker for step in result.steps}) == TURNS
        used = [step.usage for step in result.steps if step.usage]
        assert result.usage.total_tokens == sum(usage.total_tokens for usage in used) > 0
        assert result.usage.llm_calls == TURNS
        assert result.cost_usd == pytest.approx(sum(step.cost_usd for step in result.steps))
    assert len(model.requests) == 3 * TURNS


SHIFTED_CLOCK = """\
import sys, time
now, now_ns = time.time, time.time_ns
time.time = lambda: now() + {seconds}
time.time_ns = lambda: now_ns() + {seconds} * 10**9
from celery.__main__ import main
sys.argv[0] = "celery"
main()
"""


def test_workers_whose_clocks_differ_by_a_minute_agree_on_every_limit(
    model: ModelServer, start_worker: Start, fleet: Fleet, effects: Path
) -> None:
    """DIST-17, TIME-20: workers of plus and minus 30 s; no run is stopped, stamps only grow."""
    model.follow(busy)
    for name, seconds in (("ahead", 30), ("behind", -30)):
        program = ("-c", SHIFTED_CLOCK.format(seconds=seconds))
        env = {"EFFECTS": str(effects)}
        start_worker(name=name, options=("-c", "2"), env=env, program=program)
    began = time.time()
    batch = fleet.submit_batch(lines(12), agent=AGENTS["plain"], time_limit=50)
    results = list(batch.results())
    took = time.time() - began
    check_all(results, effects)
    assert len({step.worker for result in results for step in result.steps}) == 2
    for result in results:
        stamps = [step.started_at.timestamp() for step in result.steps]
        assert stamps == sorted(stamps)
        assert began - 1 <= stamps[0] <= stamps[-1] <= began + took + 1
        assert 0 < result.cumulative_execution_seconds <= took


def test_a_lost_queue_is_rebuilt_from_the_index(
    model: ModelServer, start_worker: Start, fleet: Fleet, effects: Path, redis_url: str
) -> None:
    """DIST-10: delete every message; the rescuer brings the runs back once."""
    model.follow(busy)
    batch = fleet.submit_batch(lines(20), agent=AGENTS["plain"])
    with redis.Redis.from_url(redis_url) as client:
        assert client.delete("stepfleet") == 1
    start_worker(env={"EFFECTS": str(effects)})
    check_all(list(batch.results()), effects)


def test_messages_delivered_twice_change_nothing(
    model: ModelServer, start_worker: Start, fleet: Fleet, effects: Path, redis_url: str
) -> None:
    """DIST-04, RUN-06: same result as once, step numbers without a gap."""
    model.follow(busy)
    batch = fleet.submit_batch(lines(20), agent=AGENTS["plain"])
    with redis.Redis.from_url(redis_url) as client:
        for message in client.lrange("stepfleet", 0, -1):
            client.lpush("stepfleet", message)
    start_worker(name="w1", env={"EFFECTS": str(effects)})
    start_worker(name="w2", env={"EFFECTS": str(effects)})
    check_all(list(batch.results()), effects)
    assert batch.progress().steps == 20 * TURNS


def test_a_restart_of_redis_loses_nothing_that_was_committed(
    model: ModelServer,
    start_worker: Start,
    own_redis: Callable[..., RedisServer],
    effects: Path,
) -> None:
    """DIST-12: the worker waits, says so, and goes on by itself."""
    rules = Busy("effect", turns=TURNS, latency=0.02)
    model.follow(rules)
    server = own_redis(appendfsync="always")
    worker = start_worker(server.url, env={"EFFECTS": str(effects)})
    with Fleet(server.url) as fleet:
        batch = fleet.submit_batch(lines(30), agent=AGENTS["plain"], **NO_LIMITS)
        wait_until(lambda: batch.progress().steps >= 10, within=LONG)
        assert batch.progress().open == 30
        server.kill()
        rules.struck.set()
        server.start()
        check_all(list(batch.results()), effects, NO_LIMITS["max_steps"])
    assert "waiting for it" in worker.log or "Connection to broker lost" in worker.log


def test_a_worker_that_is_stopped_hands_its_runs_back(
    model: ModelServer, start_worker: Start, fleet: Fleet, effects: Path
) -> None:
    """The drain is bounded, and nobody waits for a lease."""

    def slow_once(request: RequestRecord) -> Reply:
        late = 300.0 if request.attempt == 1 else 0.0
        return Reply("slow answer", latency=late)

    model.follow(slow_once)
    env = {"EFFECTS": str(effects), "STEPFLEET_DRAIN": "0.5", "STEPFLEET_LEASE": "600"}
    leaver = start_worker(name="leaver", env=env)
    batch = fleet.submit_batch(lines(5), agent=AGENTS["plain"])
    wait_until(lambda: len(model.requests) == 5, within=LONG)
    leaver.signal(signal.SIGTERM)
    assert leaver.wait(within=LONG) == 0
    start_worker(name="heir", env=env)
    results = list(batch.results())
    assert {result.output for result in results} == {"slow answer"}
    for result in results:
        assert [lost.kind for lost in result.lost_attempts] == ["interrupted"]


def test_a_worker_that_is_shut_down_cold_fails_no_run(
    model: ModelServer, start_worker: Start, fleet: Fleet, effects: Path
) -> None:
    """Its steps go back at once, and are done by another."""
    model.follow(lambda request: Reply("answer", latency=300.0 if request.attempt == 1 else 0.0))
    env = {"EFFECTS": str(effects), "STEPFLEET_LEASE": "600"}
    leaver = start_worker(name="leaver", env=env)
    batch = fleet.submit_batch(lines(5), agent=AGENTS["plain"])
    wait_until(lambda: len(model.requests) == 5, within=LONG)
    leaver.signal(signal.SIGQUIT)
    leaver.wait(within=LONG)
    start_worker(name="heir", env=env)
    for result in batch.results():
        assert result.output == "answer"
        assert [lost.kind for lost in result.lost_attempts] == ["interrupted"]


def test_a_cancel_ends_the_step_in_flight_at_once(
    model: ModelServer, start_worker: Start, fleet: Fleet, effects: Path
) -> None:
    """RUN-17, DIST-09"""
    model.follow(lambda _: Reply("too late", latency=600.0))
    start_worker(env={"EFFECTS": str(effects), "STEPFLEET_LEASE": "600"})
    run_id = fleet.submit(AGENTS["plain"], "a long question")
    wait_until(lambda: len(model.requests) == 1, within=LONG)
    fleet.runs.cancel(run_id)
    result = fleet.runs.wait(run_id, timeout=LONG)
    assert result.status is RunStatus.CANCELLED


def test_no_secret_of_the_environment_reaches_redis_or_the_log(
    model: ModelServer, start_worker: Start, fleet: Fleet, effects: Path, redis_url: str
) -> None:
    """CONF-08, EVT-24: the canary key was sent to the model and stands nowhere else."""
    model.follow(busy)
    worker = start_worker(env={"EFFECTS": str(effects)})
    check_all(list(fleet.submit_batch(lines(3), agent=AGENTS["plain"]).results()), effects)
    with redis.Redis.from_url(redis_url) as client:
        dumped = b"".join(client.dump(key) or b"" for key in client.scan_iter())
    assert b"sk-test-canary" not in dumped
    assert "sk-test-canary" not in worker.log
    assert os.environ.get("OPENAI_API_KEY") != "sk-test-canary"
