"""Messages that end a stock worker, or make it reconnect for ever, go to quarantine instead."""

# mypy: allow-untyped-calls

import base64
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from support.deadlines import wait_until
from support.servers.redis_servers import RedisServer
from support.workers.toy_worker import ToyWorker, client_app, until_heard

from stepfleet.worker.engine.transport import QUARANTINE, read_entry

LONG = 60.0


@pytest.fixture(scope="module")
def broker(redis_server: RedisServer) -> str:
    redis_server.flush()
    return str(redis_server.url)


@pytest.fixture(scope="module")
def app(broker: str) -> Iterator[Celery]:
    with client_app(broker, broker) as app:
        yield app


@pytest.fixture(scope="module")
def worker(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyWorker]:
    url = broker.replace("redis://", "redis-batch://")
    worker = ToyWorker(tmp_path_factory.mktemp("worker"), url, broker)
    try:
        yield worker.start()
    finally:
        worker.end()


def message(body: bytes = b"[[], {}, {}]", **changes: Any) -> dict[str, Any]:
    """A message as Celery sends it, with some fields replaced."""
    made: dict[str, Any] = {
        "body": base64.b64encode(body).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {"lang": "py", "task": "toyapp.noop", "id": "i", "root_id": "i"},
        "properties": {
            "body_encoding": "base64",
            "delivery_tag": "t",
            "delivery_info": {"exchange": "", "routing_key": "toy"},
            "priority": 0,
        },
    }
    for path, value in changes.items():
        *where, last = path.split("__")
        target = made
        for step in where:
            target = target[step]
        target[last.replace("_", "-") if last.startswith("content") else last] = value
    return made


HOSTILE: dict[str, tuple[bytes, str]] = {
    "garbage": (b"\xff\x00 not json", "cannot be decoded"),
    "nothing": (b"", "cannot be decoded"),
    "a list": (b"[1, 2]", "a JSON list"),
    "a string": (b'"x"', "a JSON str"),
    "deep": (b"[" * 200_000 + b"]" * 200_000, "cannot be decoded"),
    "deep header": (
        json.dumps(message()).replace('"py"', "[" * 200_000 + "]" * 200_000).encode(),
        "cannot be decoded",
    ),
    "no properties": (b'{"body": "", "headers": {}}', "properties"),
    "bad base64": (json.dumps(message() | {"body": "a"}).encode(), "not valid base64"),
    "body of a wrong type": (json.dumps(message() | {"body": [1]}).encode(), "body is list"),
    "deep body": (
        json.dumps(message(b"[" * 200_000 + b"]" * 200_000)).encode(), "body cannot be decoded"
    ),
    "body without options": (json.dumps(message(b"[[], {}]")).encode(), "not [args"),
    "args of a wrong type": (json.dumps(message(b"[1, {}, {}]")).encode(), "args of the body"),
    "options of a wrong type": (json.dumps(message(b"[[], {}, 1]")).encode(), "options of"),
    "compressed": (
        json.dumps(
            message(zlib.compress(b"0" * 1000), headers__compression="application/x-gzip")
        ).encode(),
        "compressed",
    ),
    "oversized": (json.dumps(message(b"1" * 5_000_000)).encode(), "larger than"),
    "headers as a list": (json.dumps(message(headers=[1])).encode(), "headers is list"),
    "task as a list": (json.dumps(message(headers__task=["x"])).encode(), "task is list"),
    "no id": (json.dumps(message(headers={"task": "toyapp.noop"})).encode(), "id is NoneType"),
    "timelimit of text": (json.dumps(message(headers__timelimit=["x"])).encode(), "timelimit"),
    "one timelimit": (json.dumps(message(headers__timelimit=[1])).encode(), "timelimit"),
    "stamps of a wrong type": (
        json.dumps(message(headers__stamped_headers=3)).encode(),
        "Celery could not take it",
    ),
    "encoding unknown": (json.dumps(message(properties__body_encoding="x")).encode(), "body_enc"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_message_is_quarantined_and_the_worker_goes_on(
    app: Celery, worker: ToyWorker, name: str
) -> None:
    raw, reason = HOSTILE[name]
    worker.notes.delete(QUARANTINE)
    worker.notes.lpush("toy", raw)
    assert app.send_task("toyapp.add", (20, 1)).get(timeout=LONG) == 21
    wait_until(lambda: worker.notes.exists(QUARANTINE), within=LONG, what="the quarantine")
    client = app.connection_for_write().default_channel.client
    stored = client.lrange(QUARANTINE, 0, -1)
    about, payload = read_entry(stored[0])
    assert len(stored) == 1
    assert reason in about["reason"]
    assert about["queue"] == "toy"
    assert about["bytes"] == len(raw)
    assert about["at"] > 1_700_000_000
    assert payload == raw[:4096]
    wait_until(lambda: not worker.notes.hlen("unacked"), within=LONG, what="an empty unacked hash")
    assert worker.log.count("Connected to") == 1


def test_the_quarantine_keeps_the_newest_thousand(app: Celery, worker: ToyWorker) -> None:
    worker.notes.delete(QUARANTINE)
    for i in range(1100):
        worker.notes.lpush("toy", f"garbage {i}")
    assert app.send_task("toyapp.add", (1, 1)).get(timeout=LONG) == 2
    client = app.connection_for_write().default_channel.client
    assert client.llen(QUARANTINE) == 1000
    assert read_entry(client.lindex(QUARANTINE, 0))[1] == b"garbage 1099"


@pytest.mark.parametrize("raw", [b"[1]", b"[" * 200_000 + b"]" * 200_000, b"x", b'{"body": 1}'])
def test_a_hostile_broadcast_is_dropped_and_the_worker_goes_on(
    app: Celery, worker: ToyWorker, raw: bytes, redis_server: RedisServer
) -> None:
    until_heard(app, worker)
    channels = [c for c in worker.notes.pubsub_channels() if "pidbox" in c]
    patterns = worker.notes.execute_command("PUBSUB", "NUMPAT")
    assert channels or patterns
    worker.notes.publish("/0.celery.pidbox", raw)
    assert app.send_task("toyapp.add", (1, 1)).get(timeout=LONG) == 2
    assert app.control.inspect([worker.name], timeout=LONG).ping() == {worker.name: {"ok": "pong"}}
    assert worker.exit_code is None


def control_message(body: bytes, **headers: Any) -> bytes:
    return json.dumps(message(body, headers={"lang": "py", **headers})).encode()


def bomb() -> bytes:
    return zlib.compress(b"[" + b" " * 300_000_000 + b"]", 9)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (lambda: control_message(bomb(), compression="application/x-gzip"), "is compressed"),
        (lambda: control_message(b"[" + b" " * 1_100_000 + b"]"), "bytes was dropped"),
        (
            lambda: json.dumps(
                {**message(), "content-type": "application/x-python-serialize"}
            ).encode(),
            "x-",
        ),
        (lambda: b"[1]", "is a JSON list"),
    ],
    ids=["compressed", "large", "pickle", "list"],
)
def test_a_broadcast_is_judged_before_it_is_unpacked(
    app: Celery, worker: ToyWorker, raw: Callable[[], bytes], said: str
) -> None:
    """A compressed one of 0.3 MB would be 300 MB in every worker, and 1 MB a gigabyte."""
    until_heard(app, worker)
    worker.notes.publish("/0.celery.pidbox", raw())
    wait_until(lambda: said in worker.log, within=LONG, what="the refusal in the log")
    assert app.control.inspect([worker.name], timeout=LONG).ping() == {worker.name: {"ok": "pong"}}
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{worker.pid}/status").read_text())
    assert peak is not None
    assert int(peak.group(1)) < 300_000
