"""The frame of our pages in Flower, the events for those that are open, and the list of runs."""

import base64
import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection, HTTPResponse
from typing import Any
from uuid import UUID

import pytest
from support.deadlines import wait_until
from support.servers.flower_site import AUTH, LONG, Site, started_flower
from support.servers.redis_servers import RedisServer
from support.workers.command_line import CommandLine

from stepfleet.orchestrator import Agent, Fleet
from stepfleet.orchestrator.dashboard.web import MOST_TABS_OF_USER

pytestmark = pytest.mark.timeout(900)

CLERK = Agent("clerk", model="openai:none")
KNOWN = {"Authorization": f"Basic {base64.b64encode(AUTH.encode()).decode()}"}
PAGES = (
    *("/runs", "/runs/x%22%3E%3Cscript%3E", "/batches", "/batches/x"),
    *("/approvals", "/fleet", "/costs"),
)


@contextmanager
def opened(site: Site, path: str) -> Iterator[HTTPResponse]:
    connection = HTTPConnection("127.0.0.1", site.port, timeout=LONG)
    try:
        connection.request("GET", path, headers=KNOWN)
        yield connection.getresponse()
    finally:
        connection.close()


def read(site: Site, path: str) -> tuple[HTTPResponse, str]:
    with opened(site, path) as response:
        return response, response.read().decode()


def test_pages_run_no_script_and_no_style_but_files_of_this_server(
    commands: CommandLine, redis_url: str
) -> None:
    """Files have their version in their address, also those that modules import."""
    site = started_flower(commands, redis_url)
    for path in PAGES:
        response, text = read(site, path)
        assert response.status == 200, path
        policy = response.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
        assert not re.search("unsafe|http|\\*", policy)
        assert not re.search(
            r"<script(?![^>]* src=)|<style| style=| on[a-z]+=|//[a-z]+\.[a-z]", _own(text)
        )
        assert site.get(path, auth=None)[0] == 401
    files = set(re.findall(r'"(/stepfleet/[0-9a-f]+/[^"]+)"', read(site, "/runs")[1]))
    seen: set[str] = set()
    while new := files - seen:
        path = new.pop()
        seen.add(path)
        response, text = read(site, path)
        assert response.status == 200, path
        assert "immutable" in response.headers["Cache-Control"]
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        folder = path.rpartition("/")[0]
        files |= {f"{folder}/{name}" for name in re.findall(r'from "\./([^"]+)"', text)}
        assert not re.search(r"innerHTML|insertAdjacentHTML|eval\(|document\.write", text)
    assert len(seen) > 4
    folder = seen.pop().rpartition("/")[0]
    for wrong in (
        f"{folder}/../web/pages.py",
        f"{folder}/%2e%2e/web/pages.py",
        "/stepfleet/1/api.js",
    ):
        assert read(site, wrong)[0].status in (403, 404), wrong


def _own(text: str) -> str:
    """Return the page without Flower's links to its documentation and source."""
    return re.sub(r'href="https://[^"]+"|xmlns="[^"]+"', "", text)


def test_runs_are_paused_cancelled_and_exported_by_ids_and_by_filter(
    commands: CommandLine, redis_url: str, fleet: Fleet
) -> None:
    """A filter's runs are worked on in parts; those that are left alone are named, with why."""
    lines = [{"id": f"=l{n}", "input": "x"} for n in range(620)]
    batch = fleet.submit_batch(lines, agent=CLERK, tenant="acme")
    other = fleet.submit(CLERK, "x", tenant="other")
    site = started_flower(commands, redis_url)
    some = list(batch.run_ids())[:2]
    _, done = site.api("/runs/pause", {"runs": [*some, some[0]]})
    assert (done["runs"], done["left_alone"], done["refused"]) == (2, 0, {})
    _, done = site.api("/runs/retry", {"runs": [*some, "nobody"]})
    assert (done["runs"], done["left_alone"]) == (0, 3)
    assert done["refused"][some[0]] == "has not ended (paused)"
    assert done["refused"].keys() == {*some, "nobody"}

    of_acme = {"tenant": "acme", "status": "queued"}
    _, first = site.api("/runs/pause", {"filter": of_acme})
    assert (first["runs"], bool(first["next"])) == (500, True)
    _, rest = site.api("/runs/pause", {"filter": of_acme, "cursor": first["next"]})
    assert (rest["runs"], rest["next"]) == (118, None)
    assert [run["run_id"] for run in site.api("/runs?status=queued")[1]["runs"]] == [other]
    bodies: list[tuple[Any, str]] = [
        ({}, "body"),
        ({"runs": some, "filter": {}}, "body"),
        ({"filter": {"user": "x"}}, "filter"),
        ({"filter": {"status": "x"}}, "status"),
        ({"runs": ["x"] * 501}, "body"),
        ({"filter": {}, "overrides": {"max_steps": 2}}, "overrides"),
    ]
    for body, field in bodies:
        status, problem = site.api("/runs/cancel", body)
        assert (status, problem["error"].split(":")[0].split(" ")[0]) == (400, field), problem
    assert site.api("/runs/cancel", {"runs": some}, auth=None)[0] == 401

    response, text = read(site, f"/api/stepfleet/runs/export?batch={batch.id}")
    assert "attachment" in response.headers["Content-Disposition"]
    assert sorted(json.loads(line)["line_id"] for line in text.splitlines()) == sorted(
        line["id"] for line in lines
    )
    rows = list(csv.DictReader(io.StringIO(_csv(site, "tenant=acme&limit=510"))))
    assert len(rows) == 510
    assert {row["status"] for row in rows} == {"paused"}
    assert all(row["line_id"].startswith("'=l") for row in rows)
    assert read(site, "/api/stepfleet/runs/export?format=xml")[0].status == 400
    assert read(site, "/api/stepfleet/runs/export?batch=none")[0].status == 400


def _csv(site: Site, query: str) -> str:
    return read(site, f"/api/stepfleet/runs/export?format=csv&{query}")[1]


def changes(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


def test_open_pages_learn_of_changes_and_outlive_redis(
    commands: CommandLine, own_redis: Callable[..., RedisServer]
) -> None:
    """Streams are bounded, and those that have ended leave nothing."""
    server = own_redis(appendfsync="always")
    site = started_flower(commands, server.url)
    live = "/api/stepfleet/live?topic="
    with Fleet(server.url) as fleet:
        run_id = fleet.submit(CLERK, "x")
        with opened(site, f"{live}run:{run_id}&topic=fleet") as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            found = changes(response)
            assert {next(found)["topic"], next(found)["topic"]} == {"fleet", f"run:{run_id}"}
            fleet.runs.pause(run_id)
            _until(found, f"run:{run_id}")
            server.kill()
            server.start()
            fleet.runs.resume(run_id)
            _until(found, f"run:{run_id}")
    with ExitStack() as tabs:
        names = (f"{live}run:{UUID(int=number % 9)}" for number in range(MOST_TABS_OF_USER + 1))
        statuses = [tabs.enter_context(opened(site, name)).status for name in names]
        assert statuses == [200] * MOST_TABS_OF_USER + [429]

    def is_free() -> bool:
        with opened(site, f"{live}run:{UUID(int=0)}") as response:
            return next(changes(response), None) is not None

    wait_until(is_free, within=LONG, what="a place for another page")
    many = "".join(f"&topic=run:{UUID(int=n)}" for n in range(4))
    with opened(site, f"{live}run:{UUID(int=1)}.0123456789") as response:  # of a run below another
        assert response.status == 200
    short = f"run:{UUID(int=1)}.01234"
    for wrong in ("", "run:", "run:x", short, "user:1", f"fleet{many}"):
        assert read(site, live + wrong)[0].status == 400, wrong
    assert site.get(f"{live}fleet", auth=None)[0] == 401


def _until(found: Iterator[dict[str, Any]], topic: str) -> None:
    assert any(one["topic"] == topic for one in found)
