"""Tasks that are not the fleet's: Celery's own are refused, a user's need a signature with keys."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from support.deadlines import wait_until
from support.messages.forged_messages import quarantined
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator.settings.signing import HEADER, signing_keys

LONG = 60.0
KEY = "a-key-of-32-characters-and-more-x"
DUE = "sf:{s00}:due"
TASKS = """
from stepfleet.worker.app import app

@app.task(name="theirs.note")
def note(word):
    with open(__file__ + ".said", "a") as file:
        file.write(word + " ")
"""
Start = Callable[..., FleetWorker]


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url, decode_responses=False) as opened:
        yield opened


@pytest.fixture
def stranger(redis_url: str) -> Iterator[Celery]:
    with Celery(broker=redis_url, set_as_current=False) as app:
        app.conf.task_default_queue = "stepfleet"
        yield app


def writes_to(key: str) -> list[Any]:
    """Return arguments with which `celery.group` publishes to a key of the store."""
    task: dict[str, Any] = {
        "task": "x",
        "args": [],
        "kwargs": {},
        "options": {"queue": key},
        "subtask_type": None,
    }
    return [[task], ["group", None], "group", []]


@pytest.mark.parametrize("key", [KEY, None])
def test_an_unsigned_group_writes_nothing_and_is_put_aside(
    key: str | None, start_worker: Start, client: redis.Redis, stranger: Celery
) -> None:
    env = {"STEPFLEET_SIGNING_KEY": key} if key else {}
    start_worker(env=env)
    names = ("celery.group", "celery.chord", "celery.map", "celery.backend_cleanup")
    for name in names:
        stranger.send_task(name, writes_to(DUE))
    wait_until(lambda: len(quarantined(client)) == len(names), within=LONG, what="all put aside")
    told = " ".join(one["reason"] for one in quarantined(client))
    assert all(f"no task '{name}'" in told for name in names)
    assert client.type(DUE) in (b"none", b"zset")


def test_a_users_task_needs_a_signature_where_there_are_keys(
    start_worker: Start, client: redis.Redis, stranger: Celery, tmp_path: Path
) -> None:
    module = tmp_path / "theirs.py"
    module.write_text(TASKS)
    env = {"STEPFLEET_SIGNING_KEY": KEY, "PYTHONPATH": str(tmp_path)}
    start_worker(env=env, options=("-I", "theirs"))
    keys = signing_keys(KEY)
    assert keys is not None
    signature = keys.sign("theirs.note", "stepfleet", [["signed"], {}])
    stranger.send_task("theirs.note", ["unsigned"])
    stranger.send_task("theirs.note", ["forged"], headers={HEADER: signature})
    stranger.send_task("celery.group", writes_to(DUE))
    wait_until(lambda: len(quarantined(client)) == 3, within=LONG, what="three put aside")
    said = tmp_path / "theirs.py.said"
    assert not said.exists()
    stranger.send_task("theirs.note", ["signed"], headers={HEADER: signature})
    wait_until(lambda: said.exists() and said.read_text(), within=LONG, what="the signed one")
    assert said.read_text() == "signed "
