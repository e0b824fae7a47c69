"""Flower as teams run it: a stock `celery flower` behind a proxy, users by password or OAuth."""

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.deadlines import wait_until
from support.servers.flower_front import PUBLIC, Browser, oauth_provider, proxied
from support.servers.flower_site import LONG, Prefixed, stock_flower
from support.servers.redis_servers import RedisServer
from support.servers.trouble_proxy import TroubleProxy
from support.workers.known_agents import until_known

from stepfleet.orchestrator import Agent, Fleet
from stepfleet.orchestrator.dashboard.api.handling import AT_ONCE
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

pytestmark = pytest.mark.timeout(900)

ANN, BOB = "ann:flower-secret-a", "bob:flower-secret-b"
EVIL = "<img src=x onerror=alert(1)>"
ROWS = (
    "/tasks/datatable?draw=1&start=0&length=9&order[0][column]=0&order[0][dir]=asc"
    "&columns[0][data]=name&search[value]="
)


def test_tasks_lead_to_runs_and_say_what_failed_and_users_act_behind_a_proxy(
    own_redis: Callable[..., RedisServer], tmp_path: Path, model: ModelServer, start_worker: Any
) -> None:
    """Flower's own pages below a prefix, and two users whose actions are told apart."""
    url = own_redis(requirepass="redis-secret").url.replace("://", "://:redis-secret@")
    model.follow(lambda _: Reply(tool_calls=(ToolCallReply("broken", {"what": EVIL}),)))
    users = f"--basic_auth={ANN},{BOB}"
    with (
        stock_flower(tmp_path, url, users) as site,
        proxied(site.port) as port,
        proxied(site.port, keeps_host=False) as other_port,
        Fleet(url) as fleet,
    ):
        front = Prefixed(port)
        waiting = fleet.submit(Agent("clerk", model="openai:none"), "x")  # no worker has it
        start_worker(url, name=f"w1@{socket.gethostname()}")
        wait_until(lambda: "w1@" in front.get("/workers", ANN)[1], within=LONG, what="a worker")
        until_known(url, "strict")
        run_id = fleet.submit("strict", "x")

        def rows() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = orjson.loads(front.get(ROWS, ANN)[1])["data"]
            return [one for one in found if one["state"] == "FAILURE"]

        wait_until(rows, within=LONG, what="a failed task")
        (row,) = rows()
        assert row["worker"] == f"w1@{socket.gethostname()}"
        assert row["result"].startswith("tool: ValueError: cannot")
        assert len(row["result"]) <= 40
        assert EVIL not in row["exception"]  # Flower's script shows it as HTML
        status, page = front.get(f"/task/{row['uuid']}", ANN)
        assert status == 200
        assert f'href="/ops/runs/{run_id}"' in page
        for hidden in ("StepFailed", "worker/tasks.py", EVIL, "redis-secret"):
            assert hidden not in page
        assert "in broken" in page  # the traceback is that of the tool
        assert "The quarantine is empty" in front.get("/quarantine", ANN)[1]
        for path in ("/broker", "/workers", f"/worker/{row['worker']}", "/api/workers"):
            assert "redis-secret" not in front.get(path, ANN)[1], path
        assert "frame-ancestors" in _headers(front, "/ops/tasks")["Content-Security-Policy"]

        own = {"Origin": f"https://{PUBLIC}"}
        assert front.api(f"/runs/{waiting}/pause", {}, auth=ANN, **own)[1]["outcome"] == "paused"
        assert front.api(f"/runs/{waiting}/cancel", {}, auth=BOB, Origin="https://x.test")[0] == 403
        # A proxy that does not pass the Host on: the browser says where the request comes from.
        own["Sec-Fetch-Site"] = "same-origin"
        changed = Prefixed(other_port)
        assert changed.api(f"/runs/{waiting}/cancel", {}, auth=BOB, **own)[0] == 200
        entries = front.api("/audit", auth=ANN)[1]["entries"]
        assert [(one["user"], one["action"]) for one in entries] == [
            *[("bob", "cancel")] * 2,
            *[("ann", "pause")] * 2,
        ]


def _headers(site: Prefixed, path: str) -> Any:
    connection = HTTPConnection("127.0.0.1", site.port, timeout=60)
    try:
        connection.request("GET", path)
        return connection.getresponse().headers
    finally:
        connection.close()


def test_with_oauth_accounts_act_with_their_token_and_strangers_see_nothing(
    redis_url: str, tmp_path: Path, fleet: Fleet
) -> None:
    """Flower's own login by OAuth against a provider on this machine; its accounts are audited."""
    run_id = fleet.submit(Agent("clerk", model="openai:none"), "x")
    options = (
        "--auth=ann@example.com|bob@example.com",
        "--auth_provider=flower.views.auth.OktaLoginHandler",
        "--oauth2_key=flower",
        "--oauth2_secret=flower-oauth-secret",
        "--oauth2_redirect_uri=http://127.0.0.1:PORT/ops/login",
    )
    with (
        oauth_provider() as provider,
        stock_flower(
            tmp_path, redis_url, *options, FLOWER_OAUTH2_OKTA_BASE_URL=provider.url
        ) as site,
    ):

        def logged_in(user: str) -> Browser:
            browser, provider.user = Browser(f"http://127.0.0.1:{site.port}/ops"), user
            browser.ask("/login")
            browser.ask("/tasks")  # Flower's pages set the token
            return browser

        ann, bob = logged_in("ann@example.com"), logged_in("bob@example.com")
        stranger = logged_in("eve@example.com")
        assert stranger.ask("/api/stepfleet/runs")[0] == 401
        assert "Access denied" in stranger.ask("/login")[1]
        forged = Browser(f"http://127.0.0.1:{site.port}/ops")
        assert forged.ask("/api/stepfleet/runs", Cookie="user=ann@example.com")[0] == 401
        assert ann.ask("/api/stepfleet/runs")[0] == 200
        pause, cancel = (f"/api/stepfleet/runs/{run_id}/{verb}" for verb in ("pause", "cancel"))
        assert ann.ask(pause, {})[0] == 403  # without the token
        assert ann.ask(pause, {}, **{"X-XSRFToken": bob.token})[0] == 403
        # What another site's form could send.
        assert ann.ask(f"{pause}?_xsrf=x", {}, Origin="http://x.test")[0] == 403
        assert ann.ask(pause, {}, **{"X-XSRFToken": ann.token})[0] == 200
        assert bob.ask(cancel, {}, **{"X-XSRFToken": bob.token})[0] == 200
        entries = orjson.loads(bob.ask("/api/stepfleet/audit")[1])["entries"]
        assert [(one["user"], one["action"]) for one in entries[::2]] == [
            ("bob@example.com", "cancel"),
            ("ann@example.com", "pause"),
        ]


@pytest.mark.parametrize(
    ("trouble", "tabs"), [("cut", 3), pytest.param("stall", 150, marks=pytest.mark.long)]
)
def test_while_redis_is_away_requests_are_answered_and_flower_goes_on(
    own_redis: Callable[..., RedisServer], tmp_path: Path, trouble: str, tabs: int
) -> None:
    """A Redis that is gone, or silent: 503 within seconds, then answers again. 100 may wait."""
    server = own_redis()
    proxy = TroubleProxy(server.port)
    with stock_flower(tmp_path, proxy.url, f"--basic_auth={ANN}") as site:
        assert site.api("/runs", auth=ANN)[0] == 200
        getattr(proxy, trouble)()
        with ThreadPoolExecutor(tabs) as pool:
            reads = [pool.submit(site.api, "/fleet", auth=ANN) for _ in range(tabs)]
            asked, longest = time.monotonic(), 0.0
            while not all(one.done() for one in reads):
                began = time.monotonic()
                assert site.get("/healthcheck")[0] == 200
                longest = max(longest, time.monotonic() - began)
            assert longest < (time.monotonic() - asked) / 2, "it waits with them"
        assert [one.result()[0] for one in reads] == [503] * tabs
        errors = [one.result()[1]["error"] for one in reads]
        assert any("Redis" in one for one in errors)
        assert any("too many" in one for one in errors) == (tabs > AT_ONCE)
        assert site.get("/quarantine", ANN)[0] == 503
        proxy.heal()
        wait_until(lambda: site.api("/runs", auth=ANN)[0] == 200, within=LONG, what="an answer")
