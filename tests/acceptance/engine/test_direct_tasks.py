"""Steps that run without Celery's tracer: monitors, signals and messages see no difference."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from support.deadlines import wait_until
from support.workers.fleet_workers import AGENTS as FILE
from support.workers.fleet_workers import FleetWorker
from support.workers.toy_worker import Events

from stepfleet.orchestrator import Fleet
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Fault, Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

Start = Callable[..., FleetWorker]
LISTENERS = Path(__file__).parents[1] / "agent_modules" / "listeners.py"
AGENTS = load_agents(str(FILE))
LONG = 60.0
OF_THE_TRACER = "task_prerun task_success task_postrun"
ENDS = ("task-succeeded", "task-retried", "task-failed", "task-revoked")


@pytest.fixture
def app(redis_url: str) -> Iterator[Celery]:
    with Celery(broker=redis_url, set_as_current=False) as app:
        yield app


@pytest.fixture
def events(app: Celery) -> Iterator[Events]:
    with Events(app).listening() as events:
        yield events


def broken_once(request: RequestRecord) -> Reply:
    if request.turn > 1:
        return Reply("done")
    return Reply(tool_calls=(ToolCallReply("broken", {"what": "mend"}),))


def looks_once(request: RequestRecord) -> Reply:
    if request.turn > 1:
        return Reply("done")
    return Reply(tool_calls=(ToolCallReply("look", {"what": "lamp"}),))


@pytest.mark.parametrize("heard", ["", OF_THE_TRACER])
def test_events_and_signals_of_steps_are_the_same_with_and_without_the_tracer(
    heard: str,
    model: ModelServer,
    start_worker: Start,
    events: Events,
    app: Celery,
    fleet: Fleet,
    tmp_path: Path,
) -> None:
    effects = tmp_path / "effects"
    effects.touch()
    told = f"task_received task_failure task_retry {heard}"
    env = {"STEPFLEET_AGENTS": f"{FILE},{LISTENERS}", "EFFECTS": str(effects), "HEARD": told}
    worker = start_worker(options=("-l", "info"), env=env)

    def ends_of(agent: str, rules: Callable[[RequestRecord], Reply], count: int) -> list[Any]:
        model.follow(rules)
        run = fleet.submit(AGENTS[agent], f"the {count} ends of {agent}")
        fleet.runs.wait(run, timeout=LONG)

        def have_come() -> list[Any]:
            ended = [one for kind in ENDS for one in events.all(kind, 0)]
            return [one for one in ended if events_of(one["uuid"], run)]

        wait_until(lambda: len(have_come()) >= count, within=LONG, what=f"{count} ends")
        return sorted(have_come(), key=lambda one: float(one["timestamp"]))

    def events_of(task_id: str, run: Any) -> list[Any]:
        received = [one for one in events.all("task-received", 0) if one["uuid"] == task_id]
        return [one for one in received if str(run) in str(one["args"])]

    first, last = ends_of("plain", looks_once, 2)
    assert [one["result"] for one in (first, last)] == ["'continue'", "'completed'"]
    assert all(0 < one["runtime"] < LONG for one in (first, last))
    assert events.of(first["uuid"]) == ["task-received", "task-started", "task-succeeded"]
    (received,) = [one for one in events.all("task-received", 0) if one["uuid"] == first["uuid"]]
    assert received["name"] == "plain: step 1"
    (failed,) = ends_of("strict", broken_once, 1)
    assert failed["type"] == "task-failed"
    assert "cannot mend" in failed["exception"]
    assert "agents.py" in failed["traceback"]
    assert "job.py" not in failed["traceback"]
    model.fail(Fault("server_error", message="out of order"), turn=1)
    (retried, *_) = ends_of("plain", looks_once, 3)
    assert retried["type"] == "task-retried"
    assert retried["exception"].startswith("again in ")
    assert "out of order" in retried["exception"]

    lines = [line.split() for line in effects.read_text().splitlines()]
    assert ["task_failure", failed["uuid"], failed["uuid"]] in lines
    assert ["task_retry", retried["uuid"], "None"] in lines
    for name in heard.split():
        assert [name, first["uuid"]] in [line[:2] for line in lines]
    said = f"Task plain: step 1[{first['uuid']}] succeeded in {first['runtime']}s: 'continue'"
    assert said in worker.log
    totals = app.control.inspect([worker.name], timeout=LONG).stats()[worker.name]["total"]
    assert totals["plain: step 1"] == 3


def test_messages_with_options_of_celerys_are_treated_as_they_say(
    start_worker: Start, events: Events, app: Celery
) -> None:
    """No run has these names, so each step that begins is dropped."""
    worker = start_worker()

    def send(run: str, **options: Any) -> str:
        sent = app.send_task("stepfleet.step", (run, 0), queue="stepfleet", **options)
        return str(sent.id)

    def end_of(task_id: str) -> Any:
        def found() -> Any:
            ended = [one for kind in ENDS for one in events.all(kind, 0)]
            return next((one for one in ended if one["uuid"] == task_id), None)

        return wait_until(found, within=LONG, what=f"the end of {task_id}")

    dropped = "'dropped: unknown'"
    assert end_of(send("plain"))["result"] == dropped
    assert end_of(send("kept", ignore_result=False))["result"] == dropped
    began = time.time()
    late = end_of(send("late", countdown=1))
    assert late["result"] == dropped
    assert late["timestamp"] >= began + 1
    assert end_of(send("fresh", expires=LONG))["result"] == dropped
    assert end_of(send("old", expires=-1))["expired"] is True
    app.control.revoke("unwanted", destination=[worker.name], reply=True, timeout=LONG)
    assert end_of(send("revoked", task_id="unwanted"))["type"] == "task-revoked"
    linked = app.signature("stepfleet.step", ("next", 0), immutable=True, queue="stepfleet")
    linked.set(task_id="linked", ignore_result=True)
    assert end_of(send("first", link=linked))["result"] == dropped
    assert end_of("linked")["result"] == dropped
