"""Limits that the operator of a worker sets: Celery's own, and what the shipped app sets."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import redis
from support.deadlines import wait_until
from support.workers import impatient
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import (
    ErrorPolicy,
    ErrorType,
    Fleet,
    Lifecycle,
    ModelSettings,
    StopReason,
)
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.scenario import Fault, Reply
from stepfleet.worker.testing.server import ModelServer
from stepfleet.worker.toolbox.execution import DEFAULT_TIMEOUT

LONG = 60.0
TWICE = 2
CALM = {"STEPFLEET_LEASE": "30"}
AGENTS = load_agents(str(Path(__file__).parents[1] / "agent_modules" / "agents.py"))
Start = Callable[..., FleetWorker]

SETTINGS = """
import json
from stepfleet.worker.app import app
print(json.dumps({
    "late": app.conf.task_acks_late,
    "task_late": app.tasks["stepfleet.step"].acks_late,
    "visibility": app.conf.broker_transport_options["visibility_timeout"],
    "accept": list(app.conf.accept_content),
}))
"""


def test_a_soft_time_limit_of_celery_is_a_timeout_of_the_step(
    model: ModelServer, start_worker: Start, redis_url: str
) -> None:
    """ERR-32: under one policy it ends the run, under another the next step goes on."""
    model.follow(lambda request: Reply("in time", latency=600.0 if request.attempt == 1 else 0.0))
    # Above the bound below by as much as a task may wait between its start and its claim.
    start_worker(options=("--soft-time-limit", "5"))
    policy = ErrorPolicy.retry_all(3)
    with Fleet(redis_url) as fleet:
        strict = fleet.submit(AGENTS["strict"], "one", model_attempts=1)
        patient = fleet.submit(
            AGENTS["patient"], "two", error_policy=policy.to_dict(), model_attempts=1
        )
        ended = fleet.runs.wait(strict, timeout=LONG)
        went_on = fleet.runs.wait(patient, timeout=LONG)
    assert ended.stop_reason is StopReason.ERROR
    (failed,) = ended.steps
    assert [error.type for error in failed.errors] == [ErrorType.TIMEOUT]
    assert 900 <= failed.duration_ms < 60_000
    assert went_on.success
    assert [error.type for error in went_on.steps[0].errors] == [ErrorType.TIMEOUT]
    assert went_on.output == "in time"


def test_a_run_that_waits_for_its_rate_limit_leaves_the_only_slot_to_others(
    model: ModelServer, start_worker: Start, redis_url: str
) -> None:
    """ERR-22: it is refused for ten minutes; one of another model is done meanwhile."""
    model.follow(lambda _: Reply("done"))
    model.fail(Fault("rate_limited", retry_after=600.0), key="refused")
    start_worker(env={"STEPFLEET_SLOTS": "1"})
    with Fleet(redis_url) as fleet:
        refused = fleet.submit(AGENTS["plain"], "refused", time_limit=3600)
        wait_until(lambda: model.count("refused", 1), within=LONG, what="the refusal")
        other = fleet.submit(AGENTS["plain"], "other", model="openai:other")
        assert fleet.runs.wait(other, timeout=LONG).success
        waiting = fleet.runs.show(refused)
    assert (waiting.state.status, waiting.step) == (Lifecycle.IN_PROGRESS, 0)
    assert model.count("refused", 1) == 1


def test_hints_are_acknowledged_late_and_hidden_for_longer_than_any_step(redis_url: str) -> None:
    """DIST-07: and no hint has a countdown; waiting is the business of the due index."""
    done = subprocess.run(
        [sys.executable, "-c", SETTINGS],
        env={**os.environ, "STEPFLEET_REDIS_URL": redis_url},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    told = json.loads(done.stdout)
    longest = ModelSettings().timeout + 32 * DEFAULT_TIMEOUT
    assert (told["late"], told["task_late"], told["accept"]) == (True, True, ["json"])
    assert told["visibility"] > 2 * longest
    with Fleet(redis_url) as fleet:
        fleet.submit(AGENTS["plain"], "now")
        fleet.submit(AGENTS["plain"], "later", delay=3600)
    with redis.Redis.from_url(redis_url) as client:
        (message,) = client.lrange("stepfleet", 0, -1)
    headers = json.loads(message)["headers"]
    assert (headers.get("eta"), headers.get("expires")) == (None, None)


def test_a_step_that_outlasts_the_visibility_timeout_is_delivered_again_and_done_once(
    hold: Callable[..., tuple[threading.Event, threading.Event]],
    model: ModelServer,
    start_worker: Start,
    redis_url: str,
) -> None:
    """DIST-07: a worker gets its hint once more while it is under way, and none begins it anew."""
    reached, struck = hold(lambda _: Reply("done"), 1)
    program = (impatient.__file__, "celery")
    workers = [start_worker(name=name, program=program, env=CALM) for name in ("w1", "w2")]

    def deliveries() -> int:
        return sum(worker.log.count(" received") for worker in workers)

    with Fleet(redis_url) as fleet:
        run_id = fleet.submit(AGENTS["plain"], "long")
        assert reached.wait(LONG)
        wait_until(lambda: deliveries() >= TWICE, within=LONG, what="the hint once more")
        assert model.count("long", 1) == 1
        struck.set()
        result = fleet.runs.wait(run_id, timeout=LONG)
    assert (result.output, len(result.steps), result.lost_attempts) == ("done", 1, ())
    assert model.count("long", 1) == 1
