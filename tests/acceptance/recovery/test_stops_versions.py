"""Fleets in which workers of several record versions meet: one goes on, or refuses and leaves."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import orjson
import pytest
import redis
from support.deadlines import wait_until
from support.runs.packed_records import read
from support.workers import versioned
from support.workers.busy_runs import NO_LIMITS, Busy
from support.workers.fleet_workers import AGENTS, FleetWorker
from support.workers.known_agents import until_known

from stepfleet.orchestrator import Fleet
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.errors import SerializationError
from stepfleet.orchestrator.records.base import SCHEMA_VERSION
from stepfleet.worker.testing.server import ModelServer

Start = Callable[..., FleetWorker]
PLAIN = load_agents(str(AGENTS))["plain"]
PROGRAM = (versioned.__file__, "celery")
RUNS = 5
TURNS = 4
LONG = 120.0
KEY_PARTS = 3  # sf:{s00}:run:<id>; the log and the events of a run have one more
PREVIOUS, NEXT = str(SCHEMA_VERSION - 1), str(SCHEMA_VERSION + 1)


@pytest.fixture
def busy(model: ModelServer) -> Busy:
    rules = Busy(turns=TURNS, latency=0.2)
    model.follow(rules)
    return rules


@pytest.fixture
def store(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


def start_version(start_worker: Start, version: str, name: str) -> FleetWorker:
    """Start a worker whose records have that version."""
    env = {"RECORD_VERSION": version, "STEPFLEET_DRAIN": "30"}
    return start_worker(name=name, program=PROGRAM, env=env)


def stop(worker: FleetWorker) -> None:
    worker.signal(signal.SIGTERM)
    assert worker.wait(within=LONG) == 0


def command(version: str, redis_url: str, *arguments: str) -> str:
    """Return what the command line of that version prints."""
    done = subprocess.run(
        [sys.executable, versioned.__file__, "stepfleet.orchestrator.cli", *arguments],
        env={**os.environ, "RECORD_VERSION": version, "STEPFLEET_REDIS_URL": redis_url},
        capture_output=True,
        text=True,
        timeout=LONG,
        check=True,
    )
    return done.stdout


def headers(store: redis.Redis) -> dict[str, dict[str, str]]:
    """Return the headers of all runs by their keys."""
    keys = [key for key in store.scan_iter("sf:*:run:*") if key.count(":") == KEY_PARTS]
    return {str(key): cast("dict[str, str]", store.hgetall(key)) for key in keys}


def logged(store: redis.Redis, key: str) -> list[dict[str, Any]]:
    """Return a run's steps as they are stored."""
    log = cast("dict[str, str]", store.hgetall(f"{key}:log"))
    numbers = sorted(int(name) for name in log if name.isdigit())
    return [read(log[str(number)]) for number in numbers]


def made_once(model: ModelServer, steps: int) -> None:
    calls = Counter((request.key, request.turn) for request in model.requests)
    assert set(calls.values()) == {1}
    assert len(calls) == steps


def test_runs_of_the_previous_version_go_on_under_this_one(
    model: ModelServer,
    busy: Busy,
    start_worker: Start,
    fleet: Fleet,
    store: redis.Redis,
    redis_url: str,
    tmp_path: Path,
) -> None:
    """SER-24, DIST-14: created and begun there, finished here; what we do not know stays."""
    old = start_version(start_worker, PREVIOUS, "old")
    file = tmp_path / "questions.jsonl"
    given = [{"input": f"question {n}", "overrides": NO_LIMITS} for n in range(RUNS)]
    file.write_bytes(b"".join(orjson.dumps(one) + b"\n" for one in given))
    until_known(redis_url, "plain")
    batch_id = command(PREVIOUS, redis_url, "submit", str(file), "--agent", "plain").strip()
    batch = fleet.batches.get(batch_id)
    wait_until(lambda: _least_steps(store) >= 1, within=LONG, what="steps of the old one")
    stop(old)
    busy.struck.set()
    begun = headers(store)
    assert {header["v"] for header in begun.values()} == {PREVIOUS}
    assert {header["status"] for header in begun.values()} == {"in_progress"}
    for key in begun:
        store.hset(key, "unknown_field", "kept")

    start_worker(name="new")
    wait_until(lambda: not batch.progress().open, within=LONG, what="the end of the batch")

    results = list(batch.results())
    assert all(result.success and len(result.steps) >= TURNS for result in results)
    assert all(len({step.worker for step in result.steps}) == 2 for result in results)
    assert {result.lost_attempts for result in results} == {()}
    made_once(model, sum(len(result.steps) for result in results))
    for header in headers(store).values():
        assert (header["v"], header["unknown_field"]) == (str(SCHEMA_VERSION), "kept")


def test_runs_of_the_next_version_are_refused_clearly_and_lose_nothing(
    model: ModelServer,
    busy: Busy,
    start_worker: Start,
    fleet: Fleet,
    store: redis.Redis,
    redis_url: str,
) -> None:
    """SER-24, DIST-14: begun here, taken on there, refused here, finished there."""
    newer = start_version(start_worker, NEXT, "newer")
    run_ids = [fleet.submit(PLAIN, f"question {n}", **NO_LIMITS) for n in range(RUNS)]
    wait_until(lambda: _least_steps(store) >= 1, within=LONG, what="steps of the newer one")
    stop(newer)
    busy.struck.set()
    before = {key: logged(store, key) for key in headers(store)}
    assert all(step[versioned.NEWS] == "kept" for log in before.values() for step in log)
    asked = len(model.requests)

    ours = start_worker(name="ours")
    refusal = f"left to other workers: the run's records have version {NEXT}; this version reads"
    wait_until(lambda: ours.log.count(refusal) >= RUNS, within=LONG, what="refusals")
    assert "upgrade this worker" in ours.log
    with pytest.raises(SerializationError, match="upgrade this worker or client"):
        fleet.runs.result(run_ids[0])
    stop(ours)
    assert len(model.requests) == asked
    assert {key: logged(store, key) for key in headers(store)} == before
    assert {header["v"] for header in headers(store).values()} == {NEXT}

    start_version(start_worker, NEXT, "newest")
    wait_until(lambda: _ended(store) == RUNS, within=LONG, what="the end of all runs")

    made_once(model, sum(len(logged(store, key)) for key in headers(store)))
    for key in headers(store):
        assert len(logged(store, key)) >= TURNS
        assert all(step[versioned.NEWS] == "kept" for step in logged(store, key))
    shown = orjson.loads(command(NEXT, redis_url, "show", run_ids[0], "--json"))
    assert shown["status"] == "completed"


def test_a_mixed_fleet_finishes_every_run_and_repeats_no_step(
    model: ModelServer, busy: Busy, start_worker: Start, fleet: Fleet, store: redis.Redis
) -> None:
    """SER-24, DIST-14: whom a newer worker has touched is finished by newer ones."""
    busy.struck.set()
    start_worker(name="ours")
    start_version(start_worker, NEXT, "newer")

    for n in range(RUNS):
        fleet.submit(PLAIN, f"question {n}")

    wait_until(lambda: _ended(store) == RUNS, within=LONG, what="the end of all runs")
    assert {header["status"] for header in headers(store).values()} == {"completed"}
    made_once(model, RUNS * TURNS)
    for key, header in headers(store).items():
        news = [versioned.NEWS in step for step in logged(store, key)]
        assert news == sorted(news)
        assert header["v"] == (NEXT if any(news) else str(SCHEMA_VERSION))


def _least_steps(store: redis.Redis) -> int:
    """Return how many steps the run has that has the fewest; 0 while runs are missing."""
    found = [int(header["step"]) for header in headers(store).values()]
    return min(found) if len(found) == RUNS else 0


def _ended(store: redis.Redis) -> int:
    return sum("ended" in header for header in headers(store).values())
