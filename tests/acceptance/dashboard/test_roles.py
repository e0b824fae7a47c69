"""Roles in a real Flower: who may call what, at every address, and what pages offer."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from celery import Celery
from flower.urls import handlers
from playwright.sync_api import Browser, expect
from support.browser import LONG, Visitor
from support.deadlines import wait_until
from support.servers.flower_front import Browser as Client
from support.servers.flower_front import oauth_provider
from support.servers.flower_site import Site, started_flower, stock_flower
from support.servers.redis_servers import RedisServer
from support.workers.command_line import CommandLine
from tornado.web import RequestHandler

from stepfleet.orchestrator import Agent, Fleet
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.dashboard.api.handling import Site as Shown
from stepfleet.orchestrator.dashboard.api.routes import api_routes
from stepfleet.orchestrator.dashboard.quarantine import quarantine_routes, refused_by
from stepfleet.orchestrator.dashboard.web import page_routes
from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

pytestmark = pytest.mark.timeout(600)
CAREFUL = Path(__file__).parents[1] / "agent_modules" / "careful_agents.py"
ANN, BOB, CAT, DAN = (f"{name}:{name}-secret" for name in ("ann", "bob", "cat", "dan"))
ROLES: dict[str, Any] = {
    "STEPFLEET_FLOWER_OPERATORS": '["ann"]',
    "STEPFLEET_FLOWER_APPROVERS": '["bob"]',
    "STEPFLEET_FLOWER_VIEWERS": '["cat"]',
}
RANKS = ("viewer", "approver", "operator")
USERS = dict(zip(RANKS, (CAT, BOB, ANN), strict=True))
SECRET = "the words of a customer"
ID = "00000000-0000-4000-8000-000000000000"
API = "/api/stepfleet"
CHANGES = {
    "/api/worker/shutdown/none": "operator",
    "/api/worker/pool/restart/none": "operator",
    "/api/worker/pool/grow/none": "operator",
    "/api/worker/pool/shrink/none": "operator",
    "/api/worker/pool/autoscale/none": "operator",
    "/api/worker/queue/add-consumer/none": "operator",
    "/api/worker/queue/cancel-consumer/none": "operator",
    "/api/task/apply/none": "operator",
    "/api/task/async-apply/none": "operator",
    "/api/task/send-task/none": "operator",
    "/api/task/abort/none": "operator",
    "/api/task/timeout/none": "operator",
    "/api/task/rate-limit/none": "operator",
    "/api/task/revoke/none": "operator",
    **{f"{API}/runs/{verb}": "operator" for verb in ("retry", "cancel", "pause", "resume")},
    **{f"{API}/runs/{ID}/{verb}": "operator" for verb in ("retry", "send", "fork", "cancel")},
    **{f"{API}/batches/{ID}/{verb}": "operator" for verb in ("retry", "pause")},
    **{f"{API}/batches/{verb}": "operator" for verb in ("check", "submit")},
    **{f"{API}/limits/none/{verb}": "operator" for verb in ("set", "clear")},
    **{f"{API}/fleet/{verb}": "operator" for verb in ("pause", "resume")},
    **{f"{API}/approvals/{verb}": "approver" for verb in ("approve", "deny", "answer")},
    f"{API}/nothing": "operator",
    "/tasks/datatable": "viewer",  # a POST that reads
}
"""Addresses that change something, and the least role that may."""
READS = ("/", "/workers", "/tasks", "/runs", "/fleet", "/quarantine", "/api/workers", "/api/tasks")


@pytest.fixture(scope="module")
def of_roles(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A stock Flower with three users and their roles, and one without a role."""
    users = f"--basic_auth={ANN},{BOB},{CAT},{DAN}"
    folder = tmp_path_factory.mktemp("flower")
    with stock_flower(folder, redis_server.url, users, **ROLES) as site:
        yield site


def changing_routes() -> list[tuple[str, type[RequestHandler]]]:
    """Return the patterns of all addresses, Flower's and ours, that take anything but GET."""
    shown = Shown.of(Settings(redis_url=None))
    ours = [*page_routes(shown), *api_routes(shown), *quarantine_routes(refused_by(shown))]
    found = []
    for route in [*handlers, *ours]:
        pattern, handler = (
            (route.regex.pattern, route.handler_class)
            if hasattr(route, "regex")
            else (f"{route[0]}$", route[1])
        )
        verbs = ("post", "put", "patch", "delete")
        base: Any = RequestHandler
        if any(getattr(handler, one) is not getattr(base, one) for one in verbs):
            found.append((pattern, handler))
    return found


def test_every_address_that_changes_something_asks_for_its_role(of_roles: Site) -> None:
    """Found in the routing table: a new one fails here until `CHANGES` says whose it is."""
    routes = changing_routes()
    assert len(routes) > 20
    unknown = [p for p, _ in routes if not any(re.match(p, path) for path in CHANGES)]
    assert unknown == []
    for path, needed in CHANGES.items():
        for role, auth in USERS.items():
            status, body = of_roles.ask("POST", path, auth)
            if RANKS.index(role) >= RANKS.index(needed):
                assert status not in (401, 403), (path, role, body)
                continue
            assert status == 403, (path, role, body)
            assert f"the role {needed}; yours is {role}" in orjson.loads(body)["error"]
        assert of_roles.ask("POST", path, DAN)[0] == 403, path
        assert "no role" in of_roles.ask("POST", path, DAN)[1]
        assert of_roles.ask("POST", path, "ann:wrong")[0] == 401, path
        assert of_roles.ask("POST", path, None)[0] == 401, path


@pytest.mark.parametrize("shape", ["run", "runs", "filter", "overrides"])
def test_the_audit_has_no_text_of_any_body(of_roles: Site, shape: str) -> None:
    """Everybody who may look reads it: of texts it has the names of their fields alone."""
    bodies: dict[str, dict[str, Any]] = {
        "run": {"message": SECRET, "at": 1},
        "runs": {"runs": [ID], "where": SECRET, "cursor": SECRET, "message": SECRET},
        "filter": {"filter": {"error": SECRET, SECRET: SECRET}, "message": SECRET},
        "overrides": {"overrides": {"api_key": SECRET, "max_steps": SECRET, SECRET: SECRET}},
    }
    ours = [path.removeprefix(API) for path in CHANGES if path.startswith(f"{API}/")]
    for path in ours:
        of_roles.api(path, bodies[shape], auth=ANN)
    status, body = of_roles.ask("GET", f"{API}/audit", CAT)
    assert (status, SECRET in body) == (200, False)
    entries = orjson.loads(body)["entries"]
    assert {"send", "fork", "set", "deny", "answer"} <= {one["action"] for one in entries}
    noted = {"run": "message", "runs": ID, "filter": "error", "overrides": "api_key"}
    assert any(noted[shape] in one["detail"] for one in entries)


def test_what_flowers_own_api_changes_is_in_the_audit(of_roles: Site) -> None:
    """Also what it has tried to; not what was refused by a role, and nothing of the body."""
    path = f"/api/task/revoke/{ID}"
    assert of_roles.ask("POST", path, CAT)[0] == 403
    assert of_roles.ask("POST", f"{path}?x={SECRET.replace(' ', '+')}", ANN)[0] == 200
    assert of_roles.ask("POST", "/api/worker/pool/grow/w9@there", ANN)[0] == 404
    assert of_roles.ask("POST", "/api/tasks", ANN)[0] == 405
    found = set[tuple[str, ...]]()

    def are_there() -> bool:
        entries = of_roles.api("/audit", auth=CAT)[1]["entries"]
        assert SECRET not in str(entries)
        names = ("user", "source", "action", "target", "detail")
        found.update(tuple(one[name] for name in names) for one in entries)
        return {
            ("ann", "flower", "revoke", f"task {ID}", "answered 200"),
            ("ann", "flower", "pool grow", "worker w9@there", "answered 404"),
        } <= found

    wait_until(are_there, within=LONG / 1000, what="two entries")
    assert not any(who == "cat" or "405" in detail for who, *_, detail in found)


def test_flowers_own_actions_are_audited_also_where_nobody_has_a_role(site: Site) -> None:
    assert site.ask("POST", "/api/worker/shutdown/w9@there")[0] == 404

    def is_there() -> bool:
        entries = site.api("/audit")[1]["entries"]
        return ("me", "shutdown") in [(one["user"], one["action"]) for one in entries]

    wait_until(is_there, within=LONG / 1000, what="an entry")
    assert site.ask("GET", "/runs", "me:flöwer")[0] == 401


@pytest.mark.parametrize("path", ["/tasks", "/runs", "/api/workers", f"{API}/runs"])
def test_a_password_in_another_alphabet_is_a_wrong_one(of_roles: Site, path: str) -> None:
    assert of_roles.ask("GET", path, "ann:пароль")[0] == 401


@pytest.mark.parametrize("verb", ["approve", "deny", "answer"])
def test_nobody_decides_all_calls_of_the_fleet_at_once(of_roles: Site, verb: str) -> None:
    status, problem = of_roles.api(f"/approvals/{verb}", {"filter": {}, "message": "x"}, auth=BOB)
    assert status == 400
    assert "name runs, or conditions" in problem["error"]


def test_viewers_read_everything_and_who_has_no_role_nothing(of_roles: Site) -> None:
    for path in READS:
        assert of_roles.ask("GET", path, CAT)[0] == 200, path
        status, body = of_roles.ask("GET", path, DAN)
        assert (status, "no role" in body) == (403, True), path
    assert of_roles.api("/fleet", auth=CAT)[0] == 200
    status, problem = of_roles.api("/fleet", auth=DAN)
    assert (status, problem["field"]) == (403, None)
    assert "no role" in problem["error"]
    assert of_roles.ask("GET", "/healthcheck", None)[0] == 200


def test_flowers_own_buttons_are_for_operators(of_roles: Site, redis_server: RedisServer) -> None:
    """A task that runs has a button that terminates it."""
    with (
        Celery(broker=redis_server.url, set_as_current=False) as app,
        app.connection_for_write() as connection,
        app.events.Dispatcher(connection, hostname="w1@here") as teller,
    ):

        def is_shown() -> bool:
            teller.send("task-received", uuid=ID, name="x")
            teller.send("task-started", uuid=ID)
            return "STARTED" in of_roles.get(f"/task/{ID}", ANN)[1]

        wait_until(is_shown, within=LONG / 1000, what="a task")
    has = {role: "task-terminate" in of_roles.get(f"/task/{ID}", USERS[role])[1] for role in RANKS}
    assert has == {"viewer": False, "approver": False, "operator": True}


def test_pages_offer_what_a_role_may_do(
    chromium: Browser,
    of_roles: Site,
    redis_url: str,
    model: ModelServer,
    start_worker: Any,
    effects: Path,
) -> None:
    """A viewer's buttons are off and say why; an approver decides, in their own name."""
    call = ToolCallReply("refund", {"customer": "x", "usd": 300.0})
    model.follow(lambda one: Reply("done") if one.turn > 1 else Reply("", tool_calls=(call,)))
    with Fleet(redis_url) as fleet:
        batch = fleet.submit_batch([{"id": "1", "input": "x"}], Agent("a", model="openai:none"))
        start_worker(env={"STEPFLEET_AGENTS": str(CAREFUL), "EFFECTS": str(effects)})
        waiting = fleet.submit(load_agents(str(CAREFUL))["clerk"], "refund")
        fleet.limits.set("tenant:a", in_flight=3)
        wait_until(lambda: list(fleet.approvals.all()), within=LONG / 1000, what="a call")
        pages = {
            f"/runs/{waiting}": ("Pause", "Cancel", "Approve", "Deny"),
            f"/batches/{batch.id}": ("Pause …", "Cancel …"),
            "/runs": ("Retry", "Cancel"),
            "/batches": ("Check the file",),
            "/fleet": ("Pause the fleet", "Set a limit", "Change", "Remove"),
            "/approvals": ("Approve", "Deny"),
        }
        viewer = Visitor(chromium, of_roles, CAT)
        for path, names in pages.items():
            page = viewer.open(f"/ops{path}")
            if path == "/batches":
                page.get_by_text("Submit a batch").click()
            for name in names:
                button = page.get_by_role("button", name=re.compile(f"^{name}")).first
                expect(button).to_be_disabled()
                expect(button).to_have_attribute("title", re.compile("yours is viewer"))
        assert viewer.barriers() == []
        assert viewer.complaints == []
        approver = Visitor(chromium, of_roles, BOB)
        page = approver.open(f"/ops/runs/{waiting}")
        expect(page.get_by_role("button", name="Cancel", exact=True)).to_be_disabled()
        page.get_by_role("button", name="Approve").click()
        page.locator("dialog[open] button[type=submit]").click()
        expect(page.locator("article").first).to_contain_text("approved by bob")
        assert fleet.runs.wait(waiting, timeout=LONG / 1000).output == "done"
        operator = Visitor(chromium, of_roles, ANN)
        page = operator.open(f"/ops/batches/{batch.id}")
        expect(page.get_by_role("button", name="Pause …")).to_be_enabled()
        audit = operator.open("/ops/fleet").get_by_label("Actions")
        expect(audit).to_contain_text("bob@")
        expect(audit).to_contain_text("flower")
        expect(audit).to_contain_text("client")


def test_accounts_have_roles_by_the_lists_of_today_and_not_by_their_session(
    redis_url: str, tmp_path: Path, fleet: Fleet
) -> None:
    """OAuth: an old session of somebody who was an operator, and one that was made up."""
    run_id = fleet.submit(Agent("clerk", model="openai:none"), "x")
    options = (
        "--auth=.*@example.com",
        "--auth_provider=flower.views.auth.OktaLoginHandler",
        "--oauth2_key=flower",
        "--oauth2_secret=flower-oauth-secret",
        "--oauth2_redirect_uri=http://127.0.0.1:PORT/ops/login",
        "--cookie_secret=always-the-same",
    )
    pause = f"{API}/runs/{run_id}/pause"
    with oauth_provider() as provider:
        known = {"FLOWER_OAUTH2_OKTA_BASE_URL": provider.url}

        def asks(site: Site, client: Client) -> int:
            return client.ask(pause, {}, **{"X-XSRFToken": client.token})[0]

        lists = {
            "STEPFLEET_FLOWER_OPERATORS": '["Ann@example.com"]',
            "STEPFLEET_FLOWER_VIEWERS": '["*@example.com"]',
        }
        with stock_flower(tmp_path, redis_url, *options, **known, **lists) as site:
            clients = {}
            for name in ("ann", "bob"):
                client = Client(f"http://127.0.0.1:{site.port}/ops")
                provider.user = f"{name}@example.com"
                client.ask("/login")
                client.ask("/tasks")
                clients[name] = client
            assert asks(site, clients["bob"]) == 403
            assert clients["bob"].ask(f"{API}/runs")[0] == 200
            assert asks(site, clients["ann"]) == 200
            forged = Client(f"http://127.0.0.1:{site.port}/ops")
            assert forged.ask(f"{API}/runs", Cookie="user=ann@example.com")[0] == 401
            assert forged.ask(pause, {}, Cookie="user=ann@example.com")[0] in (401, 403)
        lists["STEPFLEET_FLOWER_OPERATORS"] = '["bob@example.com"]'
        with stock_flower(tmp_path, redis_url, *options, **known, **lists) as site:
            for client in clients.values():
                client.root = f"http://127.0.0.1:{site.port}/ops"  # the same host: its cookies
            assert asks(site, clients["ann"]) == 403
            assert asks(site, clients["bob"]) == 200


def test_stepfleet_flower_takes_several_users_and_refuses_roles_without_users(
    redis_url: str, commands: CommandLine
) -> None:
    site = started_flower(commands, redis_url, auth=f"{ANN}\n{CAT}", **ROLES)
    assert site.api("/fleet/resume", {}, auth=ANN)[0] == 200
    assert site.api("/fleet/resume", {}, auth=CAT)[0] == 403
    assert site.ask("POST", "/api/worker/shutdown/w", CAT)[0] == 403
    assert site.get("/metrics", CAT)[0] == 200
    refused = commands("flower", "--port", "1", STEPFLEET_REDIS_URL=redis_url, **ROLES)
    assert refused.returncode == 2
    assert "roles need users" in refused.stderr
