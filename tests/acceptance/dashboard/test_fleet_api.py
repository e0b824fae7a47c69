"""What Flower finds of a fleet and its servers: checks, limits, failures by cause, and costs."""

import csv
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from redis import Redis
from support.servers.flower_site import AUTH, LONG, Site, stock_flower
from support.workers.command_line import CommandLine

from stepfleet.orchestrator import Agent, Fleet
from stepfleet.orchestrator.store.keys import LIMIT_SETTINGS, NAMES, QUARANTINE, WORKERS
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Fault, Reply
from stepfleet.worker.testing.server import ModelServer

pytestmark = pytest.mark.timeout(600)
EVIL = "<img src=x onerror=alert(1)>"
OF_THE_MACHINE = {"Python", "libraries", "worker libraries", "variables", "open files"}


@pytest.fixture
def stock(redis_url: str, tmp_path: Path) -> Iterator[Site]:
    with stock_flower(tmp_path, redis_url, f"--basic_auth={AUTH}") as site:
        yield site


def put_report(redis_url: str, name: str, **fields: Any) -> None:
    """Report a worker of another machine, which stays alive for a while."""
    report = {
        "name": name,
        "seen": time.time() + 60,
        "held": 0,
        "slots": 1,
        "agents": [EVIL],
        **fields,
    }
    with Redis.from_url(redis_url) as client:
        client.hset(WORKERS, f"{name}:1", orjson.dumps(report))


def test_the_page_finds_what_doctor_finds(
    stock: Site, fleet: Fleet, commands: CommandLine, redis_url: str
) -> None:
    """Also where a limit cannot be read, and where names are hostile."""
    put_report(redis_url, f"w1@{EVIL}", queues=["stepfleet"], tool_queues=["gpu"], version="0.0.9")
    put_report(redis_url, "w2@b", queues=["stepfleet"], stopping=True, rss_bytes=2**20)
    fleet.pause()
    with Redis.from_url(redis_url) as client:
        client.hset(LIMIT_SETTINGS, "tenant:acme", "no JSON")
        client.lpush(QUARANTINE, "{}")
        client.hset(NAMES, "lost", "no-such-digest")
    status, found = stock.api("/fleet")
    assert status == 200, found
    said = commands("doctor", "--json", STEPFLEET_REDIS_URL=redis_url)
    of_fleet = [one for one in orjson.loads(said.stdout) if one["check"] not in OF_THE_MACHINE]
    assert found["checks"] == of_fleet
    assert said.returncode == 2
    wrong = {one["check"]: one for one in found["checks"] if one["state"] != "ok"}
    assert set(wrong) == {
        *("quarantine", "worker versions", "fleet", "queue gpu", "limits", "agent lost"),
        "client version",
    } | ({"Redis durability"} & wrong.keys())
    assert all(one["fix"] for one in wrong.values())
    assert wrong["limits"]["found"] == found["limits_problem"]
    assert EVIL in wrong["worker versions"]["found"]
    assert (len(found["overview"]["workers"]), found["limits"]) == (2, [])
    _, workers = stock.api("/workers")
    assert [one["check"] for one in workers["checks"]] == ["worker versions"]
    second = next(one for one in workers["workers"] if one["name"] == "w2@b")
    assert (second["stopping"], second["rss_bytes"], second["version"]) == (True, 2**20, "")


def test_limits_failures_and_costs_are_shown_and_what_was_done_is_audited(
    stock: Site,
    fleet: Fleet,
    model: ModelServer,
    start_worker: Any,
    commands: CommandLine,
    redis_url: str,
) -> None:
    def rules(request: RequestRecord) -> Reply | Fault:
        return Fault("unauthorized") if "bad" in request.question else Reply("fine")

    model.follow(rules)
    start_worker()
    agent = Agent("plain", model="openai:gpt-4o-mini")
    lines = [{"input": "bad" if n < 2 else "good", "tenant": "acme"} for n in range(6)]
    fleet.submit_batch(lines, agent).wait(LONG)
    other = fleet.submit(agent, "bad")
    fleet.runs.wait(other, LONG)

    (worker,) = stock.api("/workers")[1]["workers"]
    assert worker["rss_bytes"] > 2**20
    assert (worker["version"] != "", worker["started_at"] is not None) == (True, True)
    _, found = stock.api("/failures")
    ((runs, key),) = [(one["runs"], one["cause"]["key"]) for one in found["groups"]]
    assert (runs, found["read"]) == (3, 3)
    _, page = stock.api(f"/runs?where=cause={key}&limit=2")
    _, rest = stock.api(f"/runs?where=cause={key}&limit=2&cursor={page['next']}")
    assert [one["status"] for one in page["runs"] + rest["runs"]] == ["failed"] * 3
    assert stock.api("/failures?tenant=acme")[1]["groups"][0]["runs"] == 2
    assert stock.api("/failures?status=x")[0] == 400

    costs = "/costs?by=model&model=openai:gpt-4o-mini&status="
    assert [one["calls"] for one in stock.api(f"{costs}committed&tenant=acme")[1]["rows"]] == [4]
    assert stock.api(f"{costs}lost")[1]["rows"] == []
    assert stock.api(f"{costs}paid")[1]["field"] == "status"
    given = ("--by", "model", "--model", "gpt-4o-mini", "--status", "committed", "--format", "csv")
    said = commands("costs", *given, STEPFLEET_REDIS_URL=redis_url).stdout.splitlines()
    assert [(row["model"], row["calls"]) for row in csv.DictReader(said)] == [("gpt-4o-mini", "4")]

    wanted = {"overrides": {"requests_per_minute": 60, "usd": 1, "on_budget": "hold"}}
    assert stock.api("/limits/tenant:acme/set", wanted)[1]["outcome"] == "set"
    (limit,) = stock.api("/fleet")[1]["limits"]
    assert (limit["levels"], limit["rooms"]) == ({"requests_per_minute": 1},) * 2
    for name, value in (("usd", -1), ("in_flight", "many"), ("burst", 0), ("usdd", 1)):
        status, problem = stock.api("/limits/tenant:acme/set", {"overrides": {name: value}})
        assert (status, problem["field"]) == (400, name), problem
    changed = stock.api("/limits/tenant:acme/set", {"overrides": {"usd": "", "on_budget": ""}})
    assert changed[0] == 200, changed
    assert fleet.limits.all()["tenant:acme"].usd is None
    assert stock.api("/limits/tenant:acme/clear", {})[1]["outcome"] == "cleared"
    assert not fleet.limits.all()
    assert stock.api("/limits/tenant:acme/clear", {})[0] == 400
    assert stock.api("/fleet/pause", {})[0] == 200
    assert stock.api("/fleet/resume", {})[0] == 200
    entries = [one for one in stock.api("/audit")[1]["entries"] if one["user"] == "me"]
    done = [
        f"{one['action']} {one['target']}".strip() for one in entries if "done" in one["detail"]
    ]
    assert done == [
        *("resume fleet", "pause fleet", "clear limit tenant:acme"),
        *("set limit tenant:acme",) * 2,
    ]
    refused = [one["detail"] for one in entries if one["detail"].startswith("refused")]
    assert len(refused) == 5
    assert refused[0] == "refused: ConfigurationError"
