"""Batches in Flower: pages of them, files that are checked and submitted, failures, results."""

import base64
import csv
import io
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlencode

import orjson
import pytest
from support.deadlines import wait_until
from support.servers.flower_site import AUTH, LONG, Site, started_flower
from support.workers.command_line import CommandLine

from stepfleet.orchestrator import Agent, Fleet
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Fault, Reply
from stepfleet.worker.testing.server import ModelServer

pytestmark = pytest.mark.timeout(900)

CLERK = Agent("plain", model="openai:gpt-4o-mini")


def upload(
    site: Site, verb: str, body: bytes, auth: str | None = AUTH, /, **given: Any
) -> tuple[int, Any]:
    """Send a file, and return status and data of the answer."""
    known = {"Authorization": f"Basic {base64.b64encode(auth.encode()).decode()}"} if auth else {}
    headers = {k.replace("_", "-"): given.pop(k) for k in list(given) if k[0].isupper()}
    connection = HTTPConnection("127.0.0.1", site.port, timeout=60)
    try:
        path = site.address(f"/batches/{verb}?{urlencode(given)}")
        connection.request("POST", path, body, {**known, **headers})
        response = connection.getresponse()
        return response.status, orjson.loads(response.read())
    finally:
        connection.close()


def test_a_file_is_checked_line_by_line_submitted_once_and_its_results_are_sent(
    commands: CommandLine, redis_url: str, fleet: Fleet, model: ModelServer, start_worker: Any
) -> None:
    model.follow(lambda one: Reply(f"<b>=1+1 {one.question}"))
    start_worker()
    fleet.run_with_steps(CLERK, "warm", timeout=LONG)
    site = started_flower(commands, redis_url)
    lines = [b'{"id": "a", "input": "one"}', b'{"id": "a", "input": "two"}', b'{"id": "c"}', b"x"]
    given = {"name": "../q.jsonl", "agent": "plain"}
    status, found = upload(site, "check", b"\n".join(lines), **given)
    assert (status, found["lines"], found["good"], found["bad"]) == (200, 4, 1, 3), found
    where = [(one["line"], one["field"]) for one in found["problems"]]
    assert where == [(2, "id"), (3, "input"), (4, None)]
    assert upload(site, "submit", b"\n".join(lines), **given)[0] == 400

    table = "id,text\nä1,eins\nb2,zwei\n".encode()
    given = {"name": "t.csv", "agent": "plain", "id": "mine", "input_field": "text"}
    given |= {"id_field": "id", "tenant": "acme", "priority": "high"}
    status, found = upload(site, "check", table, **given)
    assert (status, found["good"], found["known"], found["agents"]) == (200, 2, 0, ["plain"])
    status, done = upload(site, "submit", table, **given)
    assert (status, done["is_new"], done["runs"]) == (200, True, 2), done
    assert done["batch_id"] == found["batch_id"]
    status, again = upload(site, "submit", table, **given)
    assert (again["batch_id"], again["is_new"]) == (done["batch_id"], False)
    assert upload(site, "check", table, **given)[1]["known"] == 2
    status, refused = upload(site, "submit", table + b"c3,drei\n", **given)
    assert (status, "belongs to batch" in refused["error"]) == (400, True)
    fleet.batches.get(done["batch_id"]).wait(LONG)
    assert len(model.requests) == 3  # nothing ran twice
    _, audit = site.api("/audit")
    mine = [one for one in audit["entries"] if one["target"] == "batch mine"]
    assert [one["detail"].split(" ")[0] for one in mine][-2:] == ["done:", "requested"]

    status, text = site.get(f"/api/stepfleet/batches/{done['batch_id']}/results")
    results = [orjson.loads(line) for line in text.splitlines()]
    assert [(one["id"], one["output"]) for one in results] == [
        ("ä1", "<b>=1+1 eins"),
        ("b2", "<b>=1+1 zwei"),
    ]
    _, text = site.get(f"/api/stepfleet/batches/{done['batch_id']}/results?format=csv")
    assert [row["id"] for row in csv.DictReader(io.StringIO(text))] == ["ä1", "b2"]
    _, shown = site.api(f"/runs?batch={done['batch_id']}")
    assert {one["tenant"] for one in shown["runs"]} == {"acme"}


def test_wrong_files_and_strangers_are_refused(
    commands: CommandLine, redis_url: str, fleet: Fleet
) -> None:
    batch = fleet.submit_batch([{"input": "x"}], agent=CLERK)
    site = started_flower(commands, redis_url, STEPFLEET_FLOWER_CONTENT="0")
    good = b'{"input": "x"}'
    assert upload(site, "submit", good, None, name="a.jsonl", agent="plain")[0] == 401
    for header, value in (("Origin", "http://evil.example"), ("Sec_Fetch_Site", "cross-site")):
        assert upload(site, "submit", good, name="a.jsonl", **{header: value})[0] == 403
    for body, given, word in (
        (b"", {}, "empty"),
        (good, {"agent": "nobody"}, "no agent"),
        (good, {"agent": "plain", "priority": "urgent"}, "priority"),
        (good, {"agent": "plain", "tenant": "a b"}, "tenant"),
        (good, {"agent": "plain", "skip_invalid": "yes"}, "skip_invalid"),
        (good, {"agent": "plain", "format": "parquet"}, "format"),
        (good, {"agent": "p" * 201}, "agent"),
        (good, {"colour": "red"}, "colour"),
        (b"PK\x03\x04" + bytes(99), {"name": "a.xlsx"}, "spreadsheet"),
        (b"a,a\n1,2\n", {"format": "csv"}, "twice"),
        (b"[" * 100_000, {"format": "json"}, "JSON"),
    ):
        status, problem = upload(site, "check", body, **{"name": "a.jsonl", **given})
        assert (status, word in problem["error"]) == (400, True), problem
    connection = HTTPConnection("127.0.0.1", site.port, timeout=60)
    auth = {"Authorization": f"Basic {base64.b64encode(AUTH.encode()).decode()}"}
    size = {"Content-Length": str(200 << 20), "Expect": "100-continue"}
    connection.putrequest("POST", site.address("/batches/check?agent=plain"))
    for name, value in {**auth, **size}.items():
        connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    assert (response.status, b"128 MiB" in response.read()) == (413, True)
    connection.close()
    for _ in range(5):  # files that do not come to their end leave their places
        connection = HTTPConnection("127.0.0.1", site.port, timeout=60)
        connection.putrequest("POST", site.address("/batches/submit?agent=plain"))
        for name, value in {**auth, "Content-Length": "100"}.items():
            connection.putheader(name, value)
        connection.endheaders(good)
        connection.close()
    wait_until(lambda: upload(site, "check", b"")[0] == 400, within=LONG, what="a place for a file")
    assert [one.batch_id for one in fleet.batches.newest()] == [batch.id]
    status, text = site.get(f"/api/stepfleet/batches/{batch.id}/results")
    assert (status, "not shown" in text) == (403, True)


def test_runs_of_one_cause_are_listed_and_retried(
    commands: CommandLine, redis_url: str, fleet: Fleet, model: ModelServer, start_worker: Any
) -> None:
    mended: list[bool] = []

    def rules(request: RequestRecord) -> Reply | Fault:
        number = int(request.question)
        if number % 10 or mended:
            return Reply("good")
        return Fault("unauthorized") if number % 20 else Fault("content_filter")

    model.follow(rules)
    lines = [{"id": f"l{n}", "input": str(n)} for n in range(40)]
    batch = fleet.submit_batch(lines, agent=CLERK)
    others = [fleet.submit_batch([{"input": f"{n}1"}], agent=CLERK).id for n in range(4)]
    start_worker()
    batch.wait(LONG)
    site = started_flower(commands, redis_url)
    first = site.api("/batches?limit=3")[1]
    second = site.api(f"/batches?limit=3&cursor={first['next']}")[1]
    ids = [one["batch_id"] for one in (*first["batches"], *second["batches"])]
    assert (ids, second["next"]) == ([*reversed(others), batch.id], None)
    _, report = site.api(f"/batches/{batch.id}")
    group = next(one for one in report["failures"]["groups"] if "401" in one["example"]["text"])
    where = f"cause={group['cause']['key']}"
    status, found = site.api(f"/runs?batch={batch.id}&{urlencode({'where': where})}")
    assert (status, {one["line_id"] for one in found["runs"]}) == (200, {"l10", "l30"}), found
    status, found = site.api(f"/runs?{urlencode({'where': where})}")
    assert (status, {one["line_id"] for one in found["runs"]}) == (200, {"l10", "l30"}), found
    status, problem = site.api(f"/runs?{urlencode({'where': 'nonsense'})}")
    assert (status, problem["field"]) == (400, "where")
    mended.append(True)
    assert site.api(f"/batches/{batch.id}/retry", {"where": where})[1]["runs"] == 2
    assert batch.wait(LONG).completed == len(lines) - 2
