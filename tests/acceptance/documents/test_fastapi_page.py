"""docs/how-to/fastapi-stream.md: its service, a real worker, and readers who stay and who leave."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.deadlines import wait_until
from support.documents.documents import ROOT, blocks_of, files_of
from support.servers.redis_servers import free_port
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Fleet
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply
from stepfleet.worker.testing.server import ModelServer

Start = Callable[..., FleetWorker]
LONG = 60.0
PAGE = (ROOT / "docs" / "how-to" / "fastapi-stream.md").read_text(encoding="utf-8")
AGENTS = (
    "from stepfleet.orchestrator import Agent\nclerk = Agent('clerk', model='openai:scripted')\n"
)


@pytest.fixture
def service(tmp_path: Path, redis_url: str) -> Iterator[httpx.Client]:
    (tmp_path / "service.py").write_text(files_of(blocks_of(PAGE))["service.py"])
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "service:app", "--port", str(port)],
        cwd=tmp_path,
        env={**os.environ, "STEPFLEET_REDIS_URL": redis_url},
    )
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LONG) as client:

        def is_up() -> bool:
            try:
                return client.get("/docs").status_code == 200
            except httpx.TransportError:
                assert server.poll() is None
                return False

        try:
            wait_until(is_up, within=LONG, what="the service")
            yield client
        finally:
            server.terminate()
            server.wait(LONG)


@pytest.fixture
def worker(tmp_path: Path, start_worker: Start) -> FleetWorker:
    (tmp_path / "clerks.py").write_text(AGENTS)
    return start_worker(env={"STEPFLEET_AGENTS": str(tmp_path / "clerks.py")})


def submitted(service: httpx.Client, question: str) -> str:
    answer = service.post("/runs", params={"question": question}).raise_for_status()
    return str(answer.json()["run_id"])


def read(service: httpx.Client, run_id: str, after: int | None = None) -> list[dict[str, Any]]:
    headers = {} if after is None else {"Last-Event-ID": str(after)}
    body = service.get(f"/runs/{run_id}/events", headers=headers).raise_for_status().text
    lines = body.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


@pytest.mark.usefixtures("worker")
def test_a_reader_gets_the_text_while_it_is_written_and_goes_on_where_he_was(
    service: httpx.Client, model: ModelServer
) -> None:
    model.follow(lambda request: Reply(f"The answer to {request.key} is twelve lamps."))
    run_id = submitted(service, "q1")
    seen = read(service, run_id)
    chunks = [one["payload"]["chunk"] for one in seen if one["type"] == "agent.stream.chunk"]
    assert "".join(chunks) == "The answer to q1 is twelve lamps."
    assert seen[-1]["type"] == "agent.status"
    assert seen[-1]["payload"]["status"] == "completed"
    last = max(one["sequence"] for one in seen if "sequence" in one)
    again = [one["sequence"] for one in read(service, run_id, last - 1) if "sequence" in one]
    assert again == [last]
    unknown = service.get("/runs/nosuch/events")
    assert (unknown.status_code, "'nosuch'" in unknown.text) == (404, True)


@pytest.mark.usefixtures("worker")
def test_a_reader_who_leaves_cancels_the_run_if_the_service_wants_that(
    service: httpx.Client, model: ModelServer, redis_url: str
) -> None:
    opened = threading.Event()

    def rules(request: RequestRecord) -> Reply:
        return Reply("late", latency=0.0 if opened.is_set() else 5.0)

    model.follow(rules)
    left, stays = submitted(service, "q1"), submitted(service, "q2")
    for run_id, cancel in ((left, "true"), (stays, "false")):
        url, params = f"/runs/{run_id}/events", {"cancel": cancel}
        with service.stream("GET", url, params=params) as response:
            assert next(response.iter_text())
    opened.set()
    with Fleet(redis_url) as fleet:
        assert fleet.runs.wait(left, timeout=LONG).status == "cancelled"
        assert fleet.runs.wait(stays, timeout=LONG).status == "completed"
