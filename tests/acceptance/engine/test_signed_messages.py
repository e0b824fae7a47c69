"""Signed task messages: real workers act on those that a key of theirs signed, and on no other."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from support.deadlines import wait_until
from support.messages.forged_messages import BrokerQueue, Message, forged, quarantined
from support.servers.redis_servers import short_folder
from support.workers.command_line import CommandLine
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Fleet
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.settings.signing import HEADER, signing_keys
from stepfleet.orchestrator.store.dispatch import (
    CallTask,
    Dispatch,
    TaskMessages,
    client_app,
)
from stepfleet.worker.testing import ModelServer, Reply, RequestRecord, ToolCallReply

Start = Callable[..., FleetWorker]
FOLDER = Path(__file__).parents[1] / "agent_modules"
PLAIN = load_agents(str(FOLDER / "agents.py"))["plain"]
HEAVY_FILE = FOLDER / "heavy_agents.py"
HEAVY = load_agents(str(HEAVY_FILE))["heavy"]
KEY, OTHER = "a key of this fleet no. 1", "a key of this fleet no. 2"
LONG = 60.0
NEVER = "600"
"""Seconds of grace: what the broker lost is not brought back while a test looks."""

PLACES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "our pool and transport": ((), {}),
    "our pool on stock transport": ((), {"STEPFLEET_TRANSPORT": "stock"}),
    "prefork": (("-P", "prefork", "-c", "2"), {}),
    "prefork on stock transport": (
        ("-P", "prefork", "-c", "2"),
        {"STEPFLEET_TRANSPORT": "stock"},
    ),
}


@pytest.fixture
def broker(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def opened(redis_url: str, **given: Any) -> Fleet:
    """Return a client with settings of its own."""
    return Fleet(settings=load_settings(redis_url=redis_url, **given))


def answers(request: RequestRecord) -> Reply:
    """One tool call, then an answer."""
    if request.turn == 1:
        return Reply(tool_calls=(ToolCallReply("look", {"what": "it"}),))
    return Reply("answer")


def header(value: object) -> Callable[[Message, list[Any]], None]:
    def change(message: Message, _: list[Any]) -> None:
        message["headers"][HEADER] = value

    return change


def unsigned(message: Message, _: list[Any]) -> None:
    del message["headers"][HEADER]


def of_another_run(_: Message, body: list[Any]) -> None:
    body[0][0] = "another-run"


def of_another_step(_: Message, body: list[Any]) -> None:
    body[0][1] = 1


def with_a_limit(message: Message, _: list[Any]) -> None:
    message["headers"]["timelimit"] = [60, 50]


def with_a_callback(_: Message, body: list[Any]) -> None:
    body[2]["callbacks"] = [{"task": "stepfleet.step", "args": [], "kwargs": {}, "options": {}}]


def moved(message: Message, _: list[Any]) -> None:
    message["properties"]["delivery_info"]["routing_key"] = "gpu"


FORGERIES: dict[str, tuple[Callable[[Message, list[Any]], None], str]] = {
    "unsigned": (unsigned, "is not signed"),
    "a wrong signature": (header("0" * 64), "no key of this worker"),
    "a signature of a wrong type": (header([1]), "no key of this worker"),
    "another run": (of_another_run, "no key of this worker"),
    "another step": (of_another_step, "no key of this worker"),
    "a time limit": (with_a_limit, "options that it has now"),
    "a callback": (with_a_callback, "options that it has now"),
    "another queue": (moved, "no key of this worker"),
}


@pytest.mark.parametrize("place", PLACES)
def test_forged_step_messages_are_put_aside_and_the_signed_one_is_done(
    place: str, model: ModelServer, start_worker: Start, redis_url: str, broker: redis.Redis
) -> None:
    model.follow(answers)
    options, env = PLACES[place]
    queue = BrokerQueue(broker)
    with opened(redis_url, signing_key=KEY, grace=600.0) as fleet:
        run_id = fleet.submit(PLAIN, "a question")
        (true,) = queue.take()
        queue.put(*(forged(true, change) for change, _ in FORGERIES.values()))
        env = {"STEPFLEET_SIGNING_KEY": KEY, "STEPFLEET_GRACE": NEVER, **env}
        worker = start_worker(options=options, env=env)
        wait_until(lambda: len(quarantined(broker)) == len(FORGERIES), within=LONG)
        assert sorted(reasons(broker)) == sorted(reason for _, reason in FORGERIES.values())
        assert not model.requests
        queue.put(true)
        assert fleet.runs.wait(run_id, timeout=LONG).output == "answer"
    assert len(model.requests) == 2
    assert worker.exit_code is None
    assert KEY not in worker.log


def reasons(broker: redis.Redis) -> list[str]:
    """Return which of the known reasons each message in quarantine was given."""
    known = {reason for _, reason in FORGERIES.values()}
    return [
        next(reason for reason in known if reason in told["reason"]) for told in quarantined(broker)
    ]


@pytest.mark.parametrize("enqueue", ["script", "publish"])
def test_a_signed_batch_runs_whoever_publishes_the_next_step(
    enqueue: str, model: ModelServer, start_worker: Start, redis_url: str, broker: redis.Redis
) -> None:
    """A message of a submitter is signed, and those of scripts, of publishers and of tools."""
    model.follow(calls_render)
    env = {
        "STEPFLEET_SIGNING_KEY": KEY,
        "STEPFLEET_ENQUEUE": enqueue,
        "STEPFLEET_AGENTS": str(HEAVY_FILE),
        "EFFECTS": os.devnull,
    }
    start_worker(options=("-Q", "stepfleet,gpu"), env=env)
    lines = [{"id": f"{n}", "input": f"question {n}"} for n in range(5)]
    with opened(redis_url, signing_key=KEY, enqueue=enqueue) as fleet:
        results = list(fleet.submit_batch(lines, agent=HEAVY).results())
    assert {result.output for result in results} == {"done"}
    assert all(result.steps[0].tool_calls[0].result == "rendered it" for result in results)
    assert not quarantined(broker)


def calls_render(request: RequestRecord) -> Reply:
    """Ask for the tool that has a queue of its own, then end."""
    if request.turn == 1:
        return Reply(tool_calls=(ToolCallReply("render", {"what": "it"}),))
    return Reply("done")


def test_keys_are_changed_while_runs_are_under_way(
    model: ModelServer, start_worker: Start, redis_url: str, broker: redis.Redis
) -> None:
    """A worker with the new key first and the old one second takes messages of both."""
    model.follow(answers)
    start_worker(env={"STEPFLEET_SIGNING_KEY": f"{OTHER},{KEY}"})
    with opened(redis_url, signing_key=KEY) as old, opened(redis_url, signing_key=OTHER) as new:
        for fleet in (old, new):
            assert fleet.run(PLAIN, "a question") == "answer"
    assert not quarantined(broker)


def test_what_a_client_without_the_key_submits_is_brought_back_signed_and_told_by_doctor(
    model: ModelServer, start_worker: Start, redis_url: str, broker: redis.Redis
) -> None:
    """Its message is put aside; the run itself is in the store, and the rescuer signs."""
    model.follow(answers)
    start_worker(env={"STEPFLEET_SIGNING_KEY": KEY})
    with Fleet(redis_url) as fleet:
        assert fleet.run(PLAIN, "a question") == "answer"
    assert [told["reason"] for told in quarantined(broker)] == [
        "the message is not signed, and this worker has signing keys"
    ]
    with short_folder() as folder:
        done = CommandLine(folder)("doctor", "--json", STEPFLEET_REDIS_URL=redis_url)
    assert "1 broker messages were refused and put aside: the message is not signed" in done.stdout


@pytest.mark.parametrize("transport", ["batch", "stock"])
def test_forged_tool_messages_are_put_aside(
    transport: str,
    model: ModelServer,
    start_worker: Start,
    redis_url: str,
    broker: redis.Redis,
    tmp_path: Path,
) -> None:
    """The run waits for its tool call; only the signed message has it made, once."""
    effects = tmp_path / "effects"
    effects.touch()
    model.follow(calls_render)
    env = {
        "STEPFLEET_SIGNING_KEY": KEY,
        "STEPFLEET_GRACE": NEVER,
        "STEPFLEET_TRANSPORT": transport,
        "STEPFLEET_AGENTS": str(HEAVY_FILE),
        "EFFECTS": str(effects),
    }
    steps = start_worker(name="steps", env=env)
    queue = BrokerQueue(broker, "gpu")
    with opened(redis_url, signing_key=KEY, grace=600.0) as fleet:
        run_id = fleet.submit(HEAVY, "a question")
        wait_until(lambda: len(queue), within=LONG, what="the tool's message")
        (true,) = queue.take()
        queue.put(
            *(forged(true, change) for change in (unsigned, header("0" * 64), of_another_run))
        )
        queue.put(as_step(run_id))
        tools = start_worker(name="gpu", options=("-Q", "gpu"), env=env)
        wait_until(lambda: len(quarantined(broker)) == 4, within=LONG)
        assert effects.read_text() == ""
        queue.put(true)
        assert fleet.runs.wait(run_id, timeout=LONG).output == "done"
    assert len(effects.read_text().splitlines()) == 1
    assert steps.exit_code is None
    assert tools.exit_code is None


def as_step(run_id: str) -> bytes:
    """A step's message that was signed for its own queue and put into another one."""
    return TaskMessages("stepfleet", signing=signing_keys(KEY)).of(Work(run_id, 0), "x").encode()


def test_a_fleet_without_keys_takes_signed_messages(
    model: ModelServer, start_worker: Start, redis_url: str, broker: redis.Redis
) -> None:
    model.follow(answers)
    start_worker()
    with opened(redis_url, signing_key=KEY) as fleet:
        assert fleet.run(PLAIN, "a question") == "answer"
    assert not quarantined(broker)


async def test_every_message_of_a_dispatch_is_signed(redis_url: str) -> None:
    settings = load_settings(redis_url=redis_url, signing_key=KEY)
    app = client_app(settings)

    class Nobody:
        async def execute(self, *command: Any) -> Any:
            raise AssertionError(command)

    dispatch = Dispatch(app, Nobody(), "stepfleet", in_script=True, signing=settings.signing)
    call = CallTask(Work("run", 0, 1), "gpu", "x")
    assert HEADER in dispatch.message(Work("run", 0), "x")
    assert HEADER in dispatch.call_message(call)
    app.close()
