"""Workers that are asked to stop: what they do with their steps, under each pool."""

import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from celery import Celery
from support.deadlines import wait_until
from support.workers.busy_runs import NO_LIMITS
from support.workers.ended import lives
from support.workers.fleet_workers import AGENTS, FleetWorker

from stepfleet.orchestrator import Fleet
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

Start = Callable[..., FleetWorker]
FOLDER = Path(__file__).parents[1] / "agent_modules"
PLAIN = load_agents(str(AGENTS))["plain"]
HEAVY = load_agents(str(FOLDER / "heavy_agents.py"))["heavy"]
STUBBORN = load_agents(str(FOLDER / "stubborn_agents.py"))["stubborn"]
# What prefork does is in the gate below; twice its calls had not all begun within 90 s, which did
# not come again in 670 starts beside a load of 20. Should it come, the failure shows the log, and
# whether a process is missing, starves, or sleeps.
POOLS = ("asyncio", pytest.param("prefork", marks=pytest.mark.long), "threads", "solo")
LONG = 90.0
# Nobody's lease ends within a test: what goes on was handed back.
PATIENT = {"STEPFLEET_LEASE": "600", "STEPFLEET_GRACE": "15"}


def options(pool: str) -> tuple[str, ...]:
    return () if pool == "asyncio" else ("-P", pool, "-c", "3")


def slow_once(request: RequestRecord) -> Reply:
    """Answer the first attempt when it is too late for it."""
    return Reply("answer", latency=300.0 if request.attempt == 1 else 0.0)


def questions(pool: str) -> list[dict[str, str]]:
    """As many as that pool takes up at once."""
    return [{"input": f"question {n}"} for n in range(1 if pool == "solo" else 3)]


def until_under_way(model: ModelServer, worker: FleetWorker, calls: int) -> None:
    """Return when the model has been asked so often; say what the worker did where it was not."""
    try:
        wait_until(lambda: len(model.requests) >= calls, within=LONG, what="the calls under way")
    except AssertionError as error:
        asked = [(request.key, request.attempt) for request in model.requests]
        parent = psutil.Process(worker.pid)
        family = "\n".join(map(_state, (parent, *parent.children(recursive=True))))
        raise AssertionError(f"{error}\nasked: {asked}\n{family}\n{worker.log}") from None


def _state(process: psutil.Process) -> str:
    try:
        return f"{process.pid}: {process.status()}, {process.cpu_times()}, {process.num_threads()}"
    except psutil.NoSuchProcess:
        return f"{process.pid}: gone"


@pytest.mark.parametrize("pool", POOLS)
def test_sigterm_hands_back_at_once_what_the_drain_did_not_finish(
    pool: str, model: ModelServer, start_worker: Start, fleet: Fleet
) -> None:
    """DIST-11: a clean exit, no lease is waited for, and no crash is counted."""
    model.follow(slow_once)
    leaver = start_worker(
        name="leaver", options=options(pool), env={**PATIENT, "STEPFLEET_DRAIN": "0.5"}
    )
    given = questions(pool)
    batch = fleet.submit_batch(given, agent=PLAIN)
    until_under_way(model, leaver, len(given))

    leaver.signal(signal.SIGTERM)

    assert leaver.wait(within=LONG) == 0
    assert "Traceback" not in leaver.log
    start_worker(name="heir", env=PATIENT)
    wait_until(lambda: not batch.progress().open, within=LONG, what="the end of the batch")
    for result in batch.results():
        assert result.output == "answer"
        assert [lost.kind for lost in result.lost_attempts] == ["interrupted"]


@pytest.mark.parametrize("pool", POOLS)
def test_a_drain_that_suffices_repeats_nothing(
    pool: str, model: ModelServer, start_worker: Start, fleet: Fleet
) -> None:
    """DIST-11: the steps under way end, and the next ones are another worker's."""
    left = threading.Event()

    def busy(request: RequestRecord) -> Reply:
        if left.is_set():
            return Reply("answer")
        return Reply(tool_calls=(ToolCallReply("look", {"what": "it"}),), latency=1.0)

    model.follow(busy)
    leaver = start_worker(
        name="leaver", options=options(pool), env={**PATIENT, "STEPFLEET_DRAIN": "60"}
    )
    given = questions(pool)
    batch = fleet.submit_batch(given, agent=PLAIN, **NO_LIMITS)
    until_under_way(model, leaver, len(given))

    leaver.signal(signal.SIGTERM)

    assert leaver.wait(within=LONG) == 0
    assert batch.progress().open == len(given)
    left.set()
    assert batch.progress().steps == len(model.requests) >= len(given)
    start_worker(name="heir", env=PATIENT)
    wait_until(lambda: not batch.progress().open, within=LONG, what="the end of the batch")
    assert [result.lost_attempts for result in batch.results()] == [()] * len(given)
    calls = Counter((request.key, request.turn) for request in model.requests)
    assert set(calls.values()) == {1}


@pytest.mark.parametrize("pool", POOLS)
def test_a_second_signal_ends_the_drain(
    pool: str, model: ModelServer, start_worker: Start, fleet: Fleet
) -> None:
    """DIST-11: what is under way is handed back at once, however long the drain could last."""
    model.follow(slow_once)
    leaver = start_worker(
        name="leaver", options=options(pool), env={**PATIENT, "STEPFLEET_DRAIN": "600"}
    )
    given = questions(pool)
    batch = fleet.submit_batch(given, agent=PLAIN)
    until_under_way(model, leaver, len(given))

    leaver.signal(signal.SIGTERM)
    wait_until(lambda: "Warm shutdown" in leaver.log, within=LONG, what="the first signal heard")
    leaver.signal(signal.SIGTERM)

    assert leaver.wait(within=LONG) == 0
    start_worker(name="heir", env=PATIENT)
    wait_until(lambda: not batch.progress().open, within=LONG, what="the end of the batch")
    for result in batch.results():
        assert [lost.kind for lost in result.lost_attempts] == ["interrupted"]


@pytest.mark.parametrize("pool", ["asyncio", "prefork"])
def test_ctrl_c_twice_hands_back_as_well(
    pool: str, model: ModelServer, start_worker: Start, fleet: Fleet
) -> None:
    model.follow(slow_once)
    leaver = start_worker(
        name="leaver", options=options(pool), env={**PATIENT, "STEPFLEET_DRAIN": "600"}
    )
    run_id = fleet.submit(PLAIN, "a question")
    until_under_way(model, leaver, 1)

    leaver.signal(signal.SIGINT)
    wait_until(lambda: "Warm shutdown" in leaver.log, within=LONG, what="the first signal heard")
    leaver.signal(signal.SIGINT)

    leaver.wait(within=LONG)
    assert "Traceback" not in leaver.log
    start_worker(name="heir", env=PATIENT)
    assert fleet.runs.wait(run_id, timeout=LONG).output == "answer"


def test_children_that_get_the_signal_too_hand_back_at_once(
    model: ModelServer, start_worker: Start, fleet: Fleet
) -> None:
    """DIST-11: as where a service manager signals every process; without a drain, and no crash."""
    model.follow(slow_once)
    leaver = start_worker(
        name="leaver", options=options("prefork"), env={**PATIENT, "STEPFLEET_DRAIN": "600"}
    )
    run_id = fleet.submit(PLAIN, "a question")
    until_under_way(model, leaver, 1)

    for child in psutil.Process(leaver.pid).children(recursive=True):
        child.send_signal(signal.SIGTERM)
    leaver.signal(signal.SIGTERM)

    assert leaver.wait(within=LONG) == 0
    start_worker(name="heir", env=PATIENT)
    result = fleet.runs.wait(run_id, timeout=LONG)
    assert [lost.kind for lost in result.lost_attempts] == ["interrupted"]


@pytest.mark.parametrize("pool", ["asyncio", pytest.param("prefork", marks=pytest.mark.long)])
def test_a_step_that_cannot_be_broken_off_does_not_keep_its_worker(
    pool: str, model: ModelServer, start_worker: Start, fleet: Fleet, effects: Path
) -> None:
    """DIST-11: the bound holds, the log says why, and no process is left."""
    model.follow(
        lambda request: (
            Reply(tool_calls=(ToolCallReply("cling", {"what": "it"}),))
            if request.turn == 1
            else Reply("answer")
        )
    )
    env = {
        **PATIENT,
        "STEPFLEET_AGENTS": str(FOLDER / "stubborn_agents.py"),
        "EFFECTS": str(effects),
        "STEPFLEET_DRAIN": "0.5",
    }
    leaver = start_worker(name="leaver", options=options(pool), env=env)
    processes = [psutil.Process(leaver.pid), *psutil.Process(leaver.pid).children(recursive=True)]
    fleet.submit(STUBBORN, "a question")
    wait_until(effects.read_text, within=LONG, what="the tool under way")

    leaver.signal(signal.SIGTERM)

    assert leaver.wait(within=LONG) == 1
    assert "did not end within 8.5 s" in leaver.log
    wait_until(lambda: not any(map(lives, processes)), within=LONG, what="the end of all")


@pytest.mark.parametrize("pool", ["asyncio", "prefork"])
def test_a_tool_on_its_own_queue_is_handed_back_at_once(
    pool: str, model: ModelServer, start_worker: Start, fleet: Fleet, effects: Path
) -> None:
    """DIST-11, DIST-15: by workers of whichever pool."""
    model.follow(
        lambda request: (
            Reply(tool_calls=(ToolCallReply("measure", {"what": "it"}),))
            if request.turn == 1
            else Reply("answer")
        )
    )
    env = {
        **PATIENT,
        "STEPFLEET_AGENTS": str(FOLDER / "heavy_agents.py"),
        "EFFECTS": str(effects),
        "STEPFLEET_DRAIN": "0.5",
    }
    start_worker(name="steps", env=env)
    gpu = ("-Q", "gpu", *options(pool))
    leaver = start_worker(name="gpu1", options=gpu, env={**env, "RENDER_SECONDS": "300"})
    run_id = fleet.submit(HEAVY, "a heavy question")
    wait_until(effects.read_text, within=LONG, what="the tool under way")

    leaver.signal(signal.SIGTERM)

    assert leaver.wait(within=LONG) == 0
    start_worker(name="gpu2", options=gpu, env=env)
    result = fleet.runs.wait(run_id, timeout=LONG)
    assert result.output == "answer"
    assert [lost.kind for lost in result.lost_attempts] == ["interrupted"]


@pytest.mark.parametrize("pool", ["asyncio", "prefork"])
def test_a_stop_by_remote_control_drains_too(
    pool: str, model: ModelServer, start_worker: Start, fleet: Fleet, redis_url: str
) -> None:
    model.follow(slow_once)
    leaver = start_worker(
        name="leaver", options=options(pool), env={**PATIENT, "STEPFLEET_DRAIN": "0.5"}
    )
    run_id = fleet.submit(PLAIN, "a question")
    until_under_way(model, leaver, 1)

    with Celery(broker=redis_url, set_as_current=False) as operator:
        operator.control.shutdown(destination=["leaver@test"])

    assert leaver.wait(within=LONG) == 0
    start_worker(name="heir", env=PATIENT)
    result = fleet.runs.wait(run_id, timeout=LONG)
    assert [lost.kind for lost in result.lost_attempts] == ["interrupted"]
