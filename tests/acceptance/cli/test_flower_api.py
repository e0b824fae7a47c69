"""The JSON API in Flower: what is read of a working fleet, what is changed, and who may."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from support.servers.flower_site import AUTH, LONG, Site, started_flower, stock_flower
from support.workers.command_line import CommandLine

from stepfleet.orchestrator import Agent, Fleet
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Fault, Reply
from stepfleet.worker.testing.server import ModelServer

pytestmark = pytest.mark.timeout(900)

EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture
def stock(redis_url: str, tmp_path: Path) -> Iterator[Site]:
    """Start a stock `celery flower` with a `flowerconfig.py`, behind a prefix and a password."""
    with stock_flower(tmp_path, redis_url, f"--basic_auth={AUTH}") as site:
        yield site


def test_the_runs_that_failed_are_found_and_retried(
    stock: Site, fleet: Fleet, model: ModelServer, start_worker: Any
) -> None:
    """Also what was done is listed, with the user."""
    mended: list[bool] = []

    def rules(request: RequestRecord) -> Reply | Fault:
        is_bad = "bad" in request.question and not mended
        return Fault("unauthorized") if is_bad else Reply(f"SECRET {EVIL}")

    model.follow(rules)
    agent = Agent("plain", model="openai:gpt-4o-mini")
    lines = [{"id": f"l{n}", "input": "bad" if n % 4 == 0 else "good"} for n in range(12)]
    batch = fleet.submit_batch(lines, agent=agent, tenant="acme")
    start_worker()
    batch.wait(LONG)
    status, found = stock.api(f"/runs?status=failed&batch={batch.id}&limit=2")
    assert status == 200, found
    assert [run["line_id"] for run in found["runs"]] == ["l8", "l4"]
    assert "401" in found["runs"][0]["error"]
    _, rest = stock.api(f"/runs?status=failed&batch={batch.id}&cursor={found['next']}")
    assert [run["line_id"] for run in rest["runs"]] == ["l0"]
    assert len(stock.api("/runs?stop_reason=error&tenant=acme")[1]["runs"]) == 3
    assert len(stock.api("/runs?agent=plain&status=completed")[1]["runs"]) == 9
    _, report = stock.api(f"/batches/{batch.id}")
    (group,) = report["failures"]["groups"]
    assert (report["progress"]["failed"], group["runs"]) == (3, 3)

    mended.append(True)
    run_id = found["runs"][0]["run_id"]
    assert stock.api(f"/runs/{run_id}/retry", {})[1]["outcome"] == "retried"
    chosen = {"filter": {"status": "failed", "error": "401"}}
    _, done = stock.api(f"/batches/{batch.id}/retry", chosen)
    assert (done["runs"], done["refused"], done["next"]) == (2, {}, None)
    assert batch.wait(LONG).completed == len(lines)
    _, run = stock.api(f"/runs/{run_id}")
    assert run["steps"][-1]["text"] == f"SECRET {EVIL}"
    assert run["run"]["status"] == "completed"
    _, costs = stock.api("/costs?by=tenant,agent")
    assert costs["total"]["calls"] >= len(lines)
    _, state = stock.api("/fleet")
    assert [one["alive"] for one in state["overview"]["workers"]] == [True]
    assert [one["batch_id"] for one in stock.api("/batches")[1]["batches"]] == [batch.id]
    _, audit = stock.api("/audit?limit=2")
    assert {(one["user"], one["action"]) for one in audit["entries"]} == {("me", "retry")}
    assert audit["entries"][0]["detail"].startswith("done")


def test_strangers_other_sites_and_wrong_requests_are_refused(
    stock: Site, fleet: Fleet, redis_url: str
) -> None:
    run_id = fleet.submit(Agent("clerk", model="openai:none"), EVIL)
    assert stock.api("/runs", auth=None)[0] == 401
    assert stock.api("/runs", auth="me:wrong")[0] == 401
    assert stock.api(f"/runs/{run_id}/cancel", {}, auth=None)[0] == 401
    for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        assert stock.api(f"/runs/{run_id}/cancel", {}, **headers)[0] == 403
    for query, field in (
        ("status=done", "status"),
        ("limit=1e9", "limit"),
        ("limit=%D9%A3", "limit"),
        ("cursor=%00", "cursor"),
        ("since=yesterday", "since"),
        ("error=%FF", "error"),
        ("error=a&error=b", "error"),
    ):
        status, problem = stock.api(f"/runs?{query}")
        assert (status, problem["field"]) == (400, field), problem
    assert stock.api("/runs?sort=x")[0] == 400
    for query in (EVIL, "%", "\\", "' OR 1=1 --", "{s00}", "\r\nSET x y"):
        text = quote(query, safe="")
        assert stock.api(f"/runs?error={text}&agent={text}")[1]["runs"] == []
        assert stock.api(f"/runs/{text}")[0] == 404
        assert stock.api(f"/batches/{text}/pause", {})[0] == 404
    bodies: list[Any] = [[], {"all": True}, {"overrides": 1}, {"where": "x"}]
    for body in bodies:
        assert stock.api(f"/runs/{run_id}/retry", body)[0] == 400, body
    for name in ("on_progress", "run_id", "text", "at", "new_run_id", "failed_only", "nope"):
        for verb, more in (("retry", {}), ("fork", {}), ("send", {"message": "x"})):
            body = {"overrides": {name: 1}, **more}
            status, problem = stock.api(f"/runs/{run_id}/{verb}", body)
            assert (status, name in str(problem)) == (400, True), (verb, name, problem)
    assert stock.api(f"/runs/{run_id}/retry", {"where": "x" * 70_000})[0] == 413
    assert stock.api(f"/runs/{run_id}/pause", {})[1]["outcome"] == "paused"
    assert stock.api(f"/runs/{run_id}/resume", {})[1]["outcome"] == "resumed"
    assert stock.api(f"/runs/{run_id}/cancel", {})[1]["outcome"] == "cancelled"
    assert stock.api(f"/runs/{run_id}/cancel", {})[1]["outcome"] == "ended"
    huge = {"overrides": {"max_steps": "9" * 4_000}}
    assert stock.api(f"/runs/{run_id}/retry", huge)[0] == 400
    assert stock.api("/runs/no-such-run/cancel", {})[0] == 404
    status, document = stock.api("/openapi.json")
    assert (status, document["openapi"]) == (200, "3.1.0")
    assert _references(document) <= {
        f"#/components/schemas/{name}" for name in document["components"]["schemas"]
    }


def test_texts_are_hidden_from_strangers_and_where_the_setting_says_so(
    commands: CommandLine, redis_url: str, fleet: Fleet, model: ModelServer, start_worker: Any
) -> None:
    model.follow(lambda _: Reply("SECRET"))
    start_worker()
    result = fleet.run_with_steps(Agent("plain", model="openai:gpt-4o-mini"), "x", timeout=LONG)
    hidden = started_flower(commands, redis_url, STEPFLEET_FLOWER_CONTENT="0")
    _, found = hidden.api(f"/runs/{result.run_id}")
    assert (found["run"]["steps"], found["steps"][0]["text"]) == (1, None)
    text = hidden.address(f"/runs/{result.run_id}/text?step=1&part=step")
    assert (found["steps"][0]["cut"], hidden.file(text)[0]) == ([], 403)
    topics = f"topic=run:{result.run_id}&topic=text:{result.run_id}"
    assert hidden.line(f"/live?{topics}") == f": run:{result.run_id}\n"
    assert (found["content"], found["steps"][0]["given"]) == (False, None)
    is_open = {"FLOWER_UNAUTHENTICATED_API": "true"}
    site = started_flower(commands, redis_url, auth=None, **is_open)
    _, found = site.api(f"/runs/{result.run_id}", auth=None)
    assert (found["run"]["steps"], found["steps"][0]["text"]) == (1, None)
    assert site.api(f"/runs/{result.run_id}/retry", {}, auth=None)[0] == 403


def test_a_run_is_shown_with_what_it_was_given_lost_attempts_and_why(
    stock: Site, fleet: Fleet, model: ModelServer, start_worker: Any
) -> None:
    """And goes on with a message, or as another run from an earlier step."""
    failures = iter([Fault("overloaded")])

    def rules(request: RequestRecord) -> Reply | Fault:
        return next(failures, None) or Reply(f"to {request.question}")

    model.follow(rules)
    agent = Agent("plain", model="openai:gpt-4o-mini")
    run_id = fleet.submit(agent, EVIL)
    _, found = stock.api(f"/runs/{run_id}")
    assert (found["given"], found["steps"], found["content"]) == (EVIL, [], True)
    start_worker()
    fleet.runs.wait(run_id, LONG)
    sent = {"message": "and this? \u202e" + "y" * 3_000}
    assert stock.api(f"/runs/{run_id}/send", sent)[1]["outcome"] == "sent"
    fleet.runs.wait(run_id, LONG)
    _, found = stock.api(f"/runs/{run_id}")
    first, second = found["steps"]
    assert (first["given"], first["text"]) == (EVIL, f"to {EVIL}")
    assert second["given"].startswith("and this? \u202e")
    assert len(second["given"]) == 2_000
    assert (first["cut"], second["cut"]) == ([], ["given"])
    path = stock.address(f"/runs/{run_id}/text?step=2&part=")
    status, headers, text = stock.file(f"{path}given")
    assert (status, text) == (200, sent["message"])
    assert headers["Content-Type"] == "text/plain; charset=UTF-8"
    name = f"run-{run_id}-step-2-given.txt"
    assert headers["Content-Disposition"] == f'attachment; filename="{name}"'
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert stock.file(f"{path}text")[2] == second["text"]
    assert stock.file(f"{path}step")[2].startswith("{\n")
    for part, wrong in ((f"{path}result:0", 404), (f"{path}x%0d%0ay: z", 404), (path, 400)):
        assert stock.file(part.replace(" ", "%20"))[0] == wrong, part
    assert stock.file(f"{path}text".replace("step=2", "step=3"))[0] == 404
    assert second["tokens"] > second["output_tokens"] > 0
    (lost,) = found["lost"]
    assert (lost["step"], lost["kind"], found["lost_attempts"]) == (1, "deferred", 1)
    assert any(one["decisive"] and one["reason"] for one in found["evaluations"])
    assert (found["waits_for"], found["given"]) == ("", None)

    _, made = stock.api(f"/runs/{run_id}/fork", {"at": 1, "message": "another"})
    fleet.runs.wait(made["detail"], LONG)
    _, fork = stock.api(f"/runs/{made['detail']}")
    assert [one["given"] for one in fork["steps"]] == [EVIL, "another"]
    for body, field in (({"at": 9}, "at"), ({"message": ""}, "message"), ({"at": -1}, "at")):
        assert stock.api(f"/runs/{run_id}/fork", body)[0] == 400, (body, field)
    for verb in ("send", "fork", "retry"):
        body = {"message": "x"} if verb == "send" else {}
        assert stock.api(f"/runs/no-such-run/{verb}", body)[0] == 404
    fleet.runs.purge()
    assert stock.api(f"/runs/{run_id}")[0] == 404


def _references(part: Any) -> set[str]:
    if isinstance(part, list):
        return {one for item in part for one in _references(item)}
    if not isinstance(part, dict):
        return set()
    own = {part["$ref"]} if "$ref" in part else set()
    return own.union(*(_references(item) for item in part.values()))


def test_a_kind_of_calls_that_there_is_not_is_refused_with_the_words(stock: Site) -> None:
    status, found = stock.api("/approvals?kind=Approvals")
    assert (status, found["field"]) == (400, "kind")
    assert "approval or question" in found["error"]
    assert stock.api("/approvals?kind=question")[1]["waiting"] == []
    status, found = stock.api("/approvals/deny", {"filter": {"kind": "Approvals"}})
    assert status == 400
    assert "kind is 'Approvals'; write approval or question" in found["error"]
