"""Hard time limits of Celery and revocations: bounded, recorded, and told, under every pool."""

from collections.abc import Callable
from pathlib import Path

import pytest
from celery import Celery
from support.deadlines import wait_until
from support.workers.fleet_workers import AGENTS, FleetWorker

from stepfleet.orchestrator import ErrorPolicy, ErrorType, Fleet, StopReason
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

Start = Callable[..., FleetWorker]
FOLDER = Path(__file__).parents[1] / "agent_modules"
STRICT = load_agents(str(AGENTS))["strict"]
HEAVY = load_agents(str(FOLDER / "heavy_agents.py"))["heavy"]
STUCK = load_agents(str(FOLDER / "stubborn_agents.py"))["stuck"]
LONG = 60.0
POOLS = ("asyncio", "prefork", "threads", "solo")
# Nobody's lease ends within a test: no attempt is brought back by that.
PATIENT = {"STEPFLEET_LEASE": "600"}


def options(pool: str) -> tuple[str, ...]:
    return () if pool == "asyncio" else ("-P", pool, "-c", "1")


@pytest.mark.parametrize("pool", POOLS)
def test_a_hard_time_limit_is_a_timeout_of_the_model_and_no_endless_repetition(
    pool: str, model: ModelServer, start_worker: Start, fleet: Fleet
) -> None:
    """ERR-32: as many calls as the agent allows, each in the ledger, then the policy's word."""
    model.follow(lambda _: Reply("too late", latency=600.0))
    worker = start_worker(options=(*options(pool), "--time-limit", "2"), env=PATIENT)
    result = fleet.runs.wait(fleet.submit(STRICT, "one", model_attempts=2), timeout=LONG)
    assert result.stop_reason is StopReason.ERROR
    assert len(model.requests) == 2
    (failed,) = result.steps
    assert [error.type for error in failed.errors] == [ErrorType.TIMEOUT]
    ledger = sorted((lost.kind, lost.ambiguous) for lost in result.lost_attempts)
    assert ledger == [("deferred", True), ("failed", True)]
    assert worker.log.count("was interrupted: the step took longer than the task's time limit") == 2


@pytest.mark.parametrize("pool", POOLS)
def test_a_hard_time_limit_of_a_heavy_tool_starts_it_once(
    pool: str, model: ModelServer, start_worker: Start, fleet: Fleet, tmp_path: Path
) -> None:
    """ERR-32: the run hears of a timeout of its tool, and goes on."""
    effects = tmp_path / "effects"
    effects.touch()
    call = ToolCallReply("endless", {"what": "it"})
    model.follow(lambda r: Reply("answer") if r.turn > 1 else Reply(tool_calls=(call,)))
    agents = {"STEPFLEET_AGENTS": str(FOLDER / "heavy_agents.py"), "EFFECTS": str(effects)}
    env = {**PATIENT, **agents}
    start_worker(name="steps", env=env)
    limited = ("-Q", "gpu", *options(pool), "--time-limit", "2")
    start_worker(name="gpu", options=limited, env=env)
    policy = ErrorPolicy.retry_all(3).to_dict()
    result = fleet.runs.wait(fleet.submit(HEAVY, "one", error_policy=policy), timeout=LONG)
    assert result.output == "answer"
    (record,) = result.steps[0].tool_calls
    assert record.error is not None
    assert record.error.type is ErrorType.TIMEOUT
    assert effects.read_text().count("endless") == 1


@pytest.mark.parametrize("pool", ["asyncio", "prefork"])
def test_a_step_that_is_revoked_and_terminated_is_an_attempt_that_was_lost(
    pool: str, model: ModelServer, start_worker: Start, fleet: Fleet, redis_url: str
) -> None:
    """It comes back after a pause as after a timeout, and is in the ledger."""
    model.follow(lambda request: Reply("answer", latency=600.0 if request.attempt == 1 else 0.0))
    worker = start_worker(options=options(pool), env=PATIENT)
    run_id = fleet.submit(STRICT, "one")
    wait_until(lambda: model.requests, within=LONG, what="the call under way")
    with Celery(broker=redis_url, set_as_current=False) as operator:
        here = [worker.name]
        active = operator.control.inspect(here, timeout=LONG).active() or {}
        (task,) = active[worker.name]
        operator.control.revoke(
            task["id"], terminate=True, destination=here, reply=True, timeout=LONG
        )
    result = fleet.runs.wait(run_id, timeout=LONG)
    assert result.output == "answer"
    (lost,) = result.lost_attempts
    assert (lost.kind, lost.ambiguous) == ("deferred", True)
    assert lost.reason == "the step's task was revoked and terminated"
    assert len(model.requests) == 2


@pytest.mark.long
def test_a_child_that_a_hard_time_limit_kills_is_a_lost_worker(
    model: ModelServer, start_worker: Start, fleet: Fleet, tmp_path: Path
) -> None:
    """A tool that holds up the child's loop is killed by Celery: so often, and no more."""
    effects = tmp_path / "effects"
    effects.touch()
    call = ToolCallReply("cling_again", {"what": "it"})
    model.follow(lambda _: Reply(tool_calls=(call,)))
    agents = {"STEPFLEET_AGENTS": str(FOLDER / "stubborn_agents.py"), "EFFECTS": str(effects)}
    limited = (*options("prefork"), "--time-limit", "2")
    start_worker(options=limited, env={**PATIENT, **agents})
    result = fleet.runs.wait(fleet.submit(STUCK, "one"), timeout=LONG)
    assert result.stop_reason is StopReason.ERROR
    assert effects.read_text().count("again") <= 3
