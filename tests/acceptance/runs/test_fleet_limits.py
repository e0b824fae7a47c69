"""Limits that a whole fleet shares, on real workers and a server that enforces the same ones."""

import json
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from redis import Redis
from support.deadlines import wait_until
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Fleet, StopReason
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.rate_limits import RateLimit
from stepfleet.worker.testing.scenario import Fault, Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

Start = Callable[..., FleetWorker]
AGENT = load_agents(str(Path(__file__).parents[1] / "agent_modules" / "agents.py"))["plain"]
RUNS = 50


def rules(request: RequestRecord) -> Reply:
    """One tool, then the answer."""
    if request.turn == 1:
        call = ToolCallReply("look", {"what": request.question})
        return Reply(tool_calls=(call,), latency=0.1)
    return Reply("done", latency=0.1)


def play(start: Start, url: str, *, runs: int, latency: float, every: int) -> float:
    """Play runs of two calls on two workers; every so many of them one call is refused.

    Such are the refusals of a provider whose capacity is shared: there are as many at any rate.
    Return the seconds.
    """

    def late(request: RequestRecord) -> Reply:
        return replace(rules(request), latency=latency)

    unlucky = range(every, runs, every) if every else ()
    with ModelServer(late) as server, Fleet(url) as fleet:
        for number in unlucky:
            fault = Fault("rate_limited", retry_after=1.0)
            server.fail(fault, key=f"{number} of {every}", turn=1 + number // every % 2)
        env = {"OPENAI_BASE_URL": server.url, "STEPFLEET_SLOTS": "25"}
        workers = [start(name=f"w{n}-{every}", env=env) for n in range(2)]
        assert fleet.run(AGENT, "warm", timeout=60) == "done"
        began = time.monotonic()
        rows = [{"id": f"{n}", "input": f"{n} of {every}"} for n in range(runs)]
        batch = fleet.submit_batch(rows, AGENT)
        assert [one.output for one in batch.results()] == ["done"] * runs
        seconds = time.monotonic() - began
        statuses = [one.status for one in server.requests]
        for worker in workers:
            worker.signal(signal.SIGTERM)
        for worker in workers:
            worker.wait()
    assert statuses.count(429) == len(unlucky)
    return seconds


def test_refusals_at_random_hardly_delay_a_fleet(start_worker: Start, redis_url: str) -> None:
    """LLM-15, ERR-22: one call in fifty is refused; once such a fleet came to a stand."""
    fleet = partial(play, start_worker, redis_url, runs=300, latency=0.3)
    without = fleet(every=0)
    assert fleet(every=25) < 1.5 * without + 4


@pytest.mark.long
@pytest.mark.timeout(400)
def test_refusals_at_random_hardly_delay_a_large_fleet(start_worker: Start, redis_url: str) -> None:
    """The same with 1,301 runs at a second a call."""
    fleet = partial(play, start_worker, redis_url, runs=1301, latency=1.0)
    without = fleet(every=0)
    assert fleet(every=25) < 1.25 * without + 5


def left(url: str) -> list[object]:
    """Return what the limits' keys still hold: grants, places, lines."""
    with Redis.from_url(url, decode_responses=True) as client:
        held = [client.hlen(f"sf:{{limits}}:{name}") for name in ("grants", "waiting")]
        return [*held, client.zcard("sf:{limits}:lines")]


def test_a_fleet_uses_its_allowance_and_is_not_refused(start_worker: Start, redis_url: str) -> None:
    """LLM-15: two workers, one limit; without it a third of the calls is refused."""
    limit = '{"openai:scripted": {"requests_per_minute": 1500}}'
    with ModelServer(rules, limits=RateLimit(requests=1500)) as server, Fleet(redis_url) as fleet:
        env = {"STEPFLEET_LIMITS": limit, "OPENAI_BASE_URL": server.url, "STEPFLEET_SLOTS": "200"}
        for name in ("w1", "w2"):
            start_worker(name=name, env=env)
        batch = fleet.submit_batch([{"id": f"{n}", "input": f"{n}"} for n in range(RUNS)], AGENT)
        results = list(batch.results())
        statuses = [request.status for request in server.requests]
    assert [one.output for one in results] == ["done"] * RUNS
    assert len(statuses) == 2 * RUNS, "no call was made twice"
    assert statuses.count(429) <= 2
    wait_until(lambda: left(redis_url) == [0, 0, 0], within=30, what="the settlement of all")
    waited = [step for one in results for step in one.steps if step.waited_seconds]
    assert {step.waited_for for step in waited} == {"requests per minute of openai:scripted"}
    assert not any(one.lost_attempts for one in results)


def test_a_limit_that_nobody_has_configured_is_learned(start_worker: Start, redis_url: str) -> None:
    """LLM-15, ERR-22: few calls are refused; a run that is refused for ever ends by its time."""
    with ModelServer(rules, limits=RateLimit(requests=1200)) as server, Fleet(redis_url) as fleet:
        server.fail(Fault("rate_limited", retry_after=0.1), key="never", attempt=None)
        start_worker(env={"OPENAI_BASE_URL": server.url, "STEPFLEET_SLOTS": "200"})
        never = fleet.submit(AGENT, "never", model="openai:other", time_limit=2)
        batch = fleet.submit_batch([{"id": f"{n}", "input": f"{n}"} for n in range(RUNS)], AGENT)
        results = list(batch.results())
        ended = fleet.runs.wait(never, timeout=60)
        known = {one.name: one for one in fleet.limits.use()}
        statuses = [one.status for one in server.requests if one.key != "never"]
    assert [one.output for one in results] == ["done"] * RUNS
    assert statuses.count(200) == 2 * RUNS
    assert statuses.count(429) < RUNS / 2, "without a limit most first calls are refused"
    assert known["openai:scripted"].learned == {"requests_per_minute": 1200}
    assert known["openai:scripted"].limit is None
    assert ended.stop_reason is StopReason.TIME_LIMIT


def test_a_killed_worker_costs_no_capacity_for_longer_than_its_lease(
    start_worker: Start, redis_url: str
) -> None:
    """DIST-15: it dies with all that there is; nobody waits for ever, and no limit is exceeded."""
    limit = {"agent:plain": {"in_flight": 4}}
    env = {"STEPFLEET_LIMITS": json.dumps(limit), "STEPFLEET_LEASE": "2", "STEPFLEET_GRACE": "0.5"}
    died = threading.Event()

    def held(request: RequestRecord) -> Reply:
        return rules(request) if died.is_set() else Reply("never", latency=60.0)

    with ModelServer(held) as server, Fleet(redis_url) as fleet:
        env["OPENAI_BASE_URL"] = server.url
        victim = start_worker(name="victim", env=env)
        batch = fleet.submit_batch([{"id": f"{n}", "input": f"{n}"} for n in range(12)], AGENT)
        wait_until(lambda: server.log.in_flight == 4 and left(redis_url) == [4, 8, 1], within=30)
        victim.signal(signal.SIGKILL)
        died.set()
        before = len(server.requests)
        start_worker(name="heir", env=env)
        results = list(batch.results())
        assert server.log.most_in_flight == 4
        assert len(server.requests) == before + 24
    assert [one.output for one in results] == ["done"] * 12
    assert sum(len(one.lost_attempts) for one in results) == 4, "those that waited lost nothing"
    wait_until(lambda: left(redis_url) == [0, 0, 0], within=30, what="the settlement of all")


def test_a_batch_keeps_to_its_own_limit_from_its_first_call_on(
    start_worker: Start, redis_url: str
) -> None:
    """On workers that know of no limit; another batch beside it is not held up."""
    with ModelServer(rules) as server, Fleet(redis_url) as fleet:
        for name in ("w1", "w2"):
            start_worker(name=name, env={"OPENAI_BASE_URL": server.url})
        assert fleet.run(AGENT, "warm", timeout=60) == "done"
        rows = [{"id": f"{n}", "input": f"{n}"} for n in range(20)]
        batch = fleet.submit_batch(rows, AGENT, limit={"in_flight": 2}, priority="low")
        assert [one.output for one in batch.results()] == ["done"] * 20
        assert server.log.most_in_flight == 2
        name = f"batch:{batch.id}"
        assert fleet.limits.all()[name].in_flight == 2
        fleet.limits.set(name, in_flight=50)
        fleet.submit_batch(rows, AGENT, limit={"in_flight": 2}, priority="low")  # the same again
        assert fleet.limits.all()[name].in_flight == 50, "what somebody has set since stays"
