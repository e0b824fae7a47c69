"""What strangers put into a fleet's queue: put aside and counted, while workers go on."""

import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from support.deadlines import wait_until
from support.messages.forged_messages import BrokerQueue, quarantined
from support.messages.hostile_messages import HOSTILE, all_hostile, message
from support.servers.flower_site import started_flower
from support.workers.command_line import CommandLine
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Fleet
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.settings.settings import TOOL_TASK
from stepfleet.orchestrator.store.dispatch import TaskMessages
from stepfleet.worker.testing import ModelServer, Reply, RequestRecord, ToolCallReply

Start = Callable[..., FleetWorker]
Hold = Callable[..., tuple[threading.Event, threading.Event]]
PLAIN = load_agents(str(Path(__file__).parents[1] / "agent_modules" / "agents.py"))["plain"]
LONG = 60.0
MOST_GROWTH = 50 * 1024 * 1024
ROUNDS = 5


@pytest.fixture
def broker(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def answers(request: RequestRecord) -> Reply:
    """Two tool calls, one after the other, then an answer."""
    if request.turn < 3:
        return Reply(tool_calls=(ToolCallReply("look", {"what": str(request.turn)}),), latency=0.05)
    return Reply("answer", latency=0.05)


def memory_of(worker: FleetWorker) -> int:
    """Return the bytes that the worker and its children hold."""
    process = psutil.Process(worker.pid)
    return sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))


def drained(broker: redis.Redis) -> bool:
    return not broker.llen("stepfleet") and not broker.hlen("unacked")


@pytest.mark.parametrize("pool", ["asyncio", "prefork"])
def test_every_hostile_message_is_put_aside_and_no_worker_ends(
    pool: str, model: ModelServer, start_worker: Start, fleet: Fleet, broker: redis.Redis
) -> None:
    """SER-26: garbage, depth, bombs, pickle, yaml, forgeries; the next run completes."""
    model.follow(answers)
    options = () if pool == "asyncio" else ("-P", "prefork", "-c", "2")
    worker = start_worker(options=options)
    assert fleet.run(PLAIN, "before") == "answer"
    children = [one.pid for one in psutil.Process(worker.pid).children(recursive=True)]
    queue = BrokerQueue(broker)
    for raw in all_hostile():
        queue.put(raw)
    wait_until(lambda: drained(broker), within=LONG)
    found = [told["reason"] for told in quarantined(broker)]
    missing = {
        name: reason
        for name, (_, reason) in HOSTILE.items()
        if not any(reason in one for one in found)
    }
    assert not missing, found
    assert len(found) == len(HOSTILE), found
    assert fleet.run(PLAIN, "after") == "answer"
    assert worker.exit_code is None
    assert [one.pid for one in psutil.Process(worker.pid).children(recursive=True)] == children
    assert not (worker.log_path.parent / "pickled").exists()
    assert "Connected to" not in worker.log.partition("ready.")[2]


def test_a_flood_of_hostile_messages_costs_less_than_50_mb(
    model: ModelServer, start_worker: Start, fleet: Fleet, broker: redis.Redis
) -> None:
    model.follow(answers)
    worker = start_worker()
    assert fleet.run(PLAIN, "before") == "answer"
    before = memory_of(worker)
    queue = BrokerQueue(broker)
    most = before
    for _ in range(ROUNDS):
        for raw in all_hostile():
            queue.put(raw)

        def waits() -> bool:
            nonlocal most
            most = max(most, memory_of(worker))
            return drained(broker)

        wait_until(waits, within=LONG, what="an empty queue")
    assert fleet.run(PLAIN, "after") == "answer"
    most = max(most, memory_of(worker))
    assert len(quarantined(broker)) == ROUNDS * len(HOSTILE)
    assert most - before < MOST_GROWTH, f"grew by {(most - before) / 1024 / 1024:.0f} MB"


def test_doctor_and_flower_show_how_many_messages_were_put_aside_and_why(
    model: ModelServer,
    start_worker: Start,
    fleet: Fleet,
    broker: redis.Redis,
    redis_url: str,
    commands: CommandLine,
) -> None:
    model.follow(answers)
    start_worker()
    queue = BrokerQueue(broker)
    queue.put(b"<script>alert(1)</script>", b"[1]", b"[2]")
    queue.put(json.dumps(message(headers__task="<b>bold</b>")).encode())
    wait_until(lambda: len(quarantined(broker)) == 4, within=LONG)
    assert fleet.run(PLAIN, "after") == "answer"

    done = commands("doctor", "--json", STEPFLEET_REDIS_URL=redis_url)

    (check,) = [one for one in json.loads(done.stdout) if one["check"] == "quarantine"]
    assert check["state"] == "warn"
    assert check["found"].startswith(
        "4 broker messages were refused and put aside: "
        "the message is a JSON list, not an object (2x); "
    )
    site = started_flower(commands, redis_url)
    wait_until(lambda: site.get("/")[0] == 200, within=LONG, what="Flower's first page")
    assert 'href="/quarantine"' in site.get("/")[1]
    status, page = site.get("/quarantine")
    assert status == 200, page
    assert "4 broker messages were refused" in page
    assert "<b>bold" not in page
    assert "alert(1)" not in page
    status, told = site.get("/api/quarantine")
    assert status == 200
    assert json.loads(told)["messages"] == 4
    assert json.loads(told)["reasons"]["the message is a JSON list, not an object"] == 2
    for path in ("/quarantine", "/api/quarantine"):
        assert site.get(path, auth=None)[0] == 401


@pytest.mark.parametrize("transport", ["batch", "stock"])
def test_replayed_messages_move_no_run(
    transport: str,
    model: ModelServer,
    start_worker: Start,
    fleet: Fleet,
    broker: redis.Redis,
    hold: Hold,
) -> None:
    """Every step's message many times, before its time, in it and after the end; tools' too."""
    second, replayed = hold(answers, 2)
    worker = start_worker(env={"STEPFLEET_TRANSPORT": transport})
    queue, steps, calls = (
        BrokerQueue(broker),
        TaskMessages("stepfleet"),
        TaskMessages("stepfleet", TOOL_TASK),
    )

    def replay(run_id: str) -> None:
        built = [steps.of(Work(run_id, step), "plain: step") for step in range(6)]
        built += [calls.of(Work(run_id, step, 0), "plain") for step in range(3)]
        queue.put(*(one.encode() for one in built * 5))

    batch = fleet.submit_batch([{"id": f"{n}", "input": f"{n}"} for n in range(5)], agent=PLAIN)
    assert second.wait(LONG), "nobody asked for a second turn"
    for run_id in fleet_runs(broker):
        replay(run_id)
    assert batch.progress().open == 5
    replayed.set()
    results = {result.run_id: result for result in batch.results()}
    events = {run_id: list(fleet.runs.events(run_id)) for run_id in results}
    for run_id in results:
        replay(run_id)
    wait_until(lambda: drained(broker), within=LONG)
    assert fleet.run(PLAIN, "behind the replayed messages") == "answer"
    asked = Counter((request.key, request.turn) for request in model.requests)
    assert set(asked.values()) == {1}
    assert len(model.requests) == 6 * 3
    for run_id, result in results.items():
        assert [step.step for step in result.steps] == [1, 2, 3]
        assert fleet.runs.result(run_id) == result
        assert list(fleet.runs.events(run_id)) == events[run_id]
        assert result.lost_attempts == ()
    assert batch.progress().completed == 5
    assert worker.exit_code is None


def fleet_runs(broker: redis.Redis) -> list[str]:
    """Return the ids of all runs that the store holds."""
    names: list[bytes] = list(broker.scan_iter("sf:{s*}:run:*"))
    return sorted({name.decode().split(":run:")[1].partition(":")[0] for name in names})


def test_messages_that_were_damaged_at_random_end_no_worker(
    model: ModelServer, start_worker: Start, fleet: Fleet, broker: redis.Redis
) -> None:
    """Fields that are gone, of another type, doubled or cut: 600 ways, the same in every test."""
    model.follow(answers)
    worker = start_worker()
    dice = random.Random(20)
    queue = BrokerQueue(broker)
    for _ in range(600):
        queue.put(damaged(dice))
    wait_until(lambda: not broker.llen("stepfleet"), within=LONG)
    assert fleet.run(PLAIN, "after") == "answer"
    assert worker.exit_code is None
    assert "Connected to" not in worker.log.partition("ready.")[2]
    wait_until(lambda: drained(broker), within=LONG)


ODD: list[Any] = [None, True, -1, 1e308, "", "x" * 3000, "\ud800", "\x00", [], [[]], {}, {"a": {}}]


def damaged(dice: random.Random) -> bytes:
    """Return a step's message with one to three things wrong."""
    made = message()
    absent = ("eta", "expires", "group", "retries", "timelimit", "parent_id", "shadow")
    made["headers"] |= dict.fromkeys(absent)
    made["headers"] |= {"argsrepr": "()", "kwargsrepr": "{}", "origin": "x", "ignore_result": True}
    for _ in range(dice.randint(1, 3)):
        target = dice.choice([made, made["headers"], made["properties"]])
        if not isinstance(target, dict) or not target:
            continue
        name = dice.choice(sorted(target))
        kind = dice.random()
        if kind < 0.3:
            del target[name]
        else:
            target[name] = dice.choice(ODD)
        made.setdefault("headers", {})
        made.setdefault("properties", {})
    raw = json.dumps(made).encode()
    if dice.random() < 0.2:
        cut = dice.randrange(len(raw))
        raw = raw[:cut] + raw[cut + dice.randint(0, 5) :]
    return raw
