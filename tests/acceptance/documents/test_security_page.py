"""What docs/security.md says of Redis: the user that it names suffices for everything."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from celery import Celery
from support.deadlines import wait_until
from support.servers.flower_site import started_flower
from support.servers.redis_servers import RedisServer
from support.workers.command_line import CommandLine
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Fleet
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.store import open_store
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

Start = Callable[..., FleetWorker]
PAGE = (Path(__file__).parents[3] / "docs" / "security.md").read_text(encoding="utf-8")
RULES = dict(re.findall(r"^user (\w+) (on >PASSWORD.+?)\n```", PAGE, re.DOTALL | re.MULTILINE))
FILE = Path(__file__).parents[1] / "agent_modules" / "heavy_agents.py"
HEAVY = load_agents(str(FILE))["heavy"]
PASSWORD = "a-password-of-the-fleet"
LONG = 60.0
DEAF = "worker_enable_remote_control=false"


@pytest.fixture
def server(own_redis: Callable[..., RedisServer]) -> RedisServer:
    server = own_redis()
    assert sorted(RULES) == ["dev", "fleet"], "the page's rules"
    with redis.Redis.from_url(server.url) as client:
        for user, rule in RULES.items():
            words = rule.replace("PASSWORD", PASSWORD).replace("\\\n", " ").split()
            client.execute_command("ACL", "SETUSER", user, *words)
        client.execute_command("ACL", "LOG", "RESET")
    return server


def calls(request: RequestRecord) -> Reply:
    """Ask for a tool of its own queue, then answer; hang where the question says so."""
    if "hang" in request.key:
        return Reply("too late", latency=600.0)
    if request.turn == 1:
        return Reply(tool_calls=(ToolCallReply("render", {"what": "it"}),))
    return Reply("answer")


@pytest.mark.parametrize(
    ("transport", "user", "prefix"),
    [("batch", "fleet", ""), ("stock", "fleet", ""), ("batch", "dev", "dev:")],
)
def test_the_fleets_user_may_do_all_that_a_fleet_does_and_nothing_is_denied(
    transport: str,
    user: str,
    prefix: str,
    model: ModelServer,
    start_worker: Start,
    server: RedisServer,
    commands: CommandLine,
) -> None:
    model.follow(calls)
    url = server.url.replace("redis://", f"redis://{user}:{PASSWORD}@")
    env = {
        "STEPFLEET_PREFIX": prefix,
        "STEPFLEET_AGENTS": str(FILE),
        "EFFECTS": "/dev/null",
        "STEPFLEET_TRANSPORT": transport,
        "STEPFLEET_EVENTS_URL": url,
    }
    site = started_flower(commands, url, STEPFLEET_PREFIX=prefix)
    start_worker(url, options=("-Q", "stepfleet,gpu"), env=env)
    lines = [{"id": f"{n}", "input": f"question {n}"} for n in range(3)]
    with Fleet(settings=load_settings(redis_url=url, prefix=prefix)) as fleet:
        results = list(fleet.submit_batch(lines, agent=HEAVY).results())
        assert {result.output for result in results} == {"answer"}
        run_id = fleet.submit(HEAVY, "hang on")
        wait_until(lambda: any("hang" in one.key for one in model.requests), within=LONG)
        fleet.runs.pause(run_id)
        fleet.runs.cancel(run_id)
        assert fleet.runs.wait(run_id, timeout=LONG).status == "cancelled"
        list(fleet.runs.events(results[0].run_id, follow=True))
        assert fleet.overview().workers
        copy = fleet.history.fork(results[0].run_id, at=1)
        assert copy
    wait_until(lambda: site.get("/broker")[0] == 200, within=LONG)
    for arguments in (("doctor", "--json"), ("status",), ("show", results[0].run_id)):
        done = commands(*arguments, STEPFLEET_REDIS_URL=url, STEPFLEET_PREFIX=prefix)
        assert "NOPERM" not in done.stdout + done.stderr
        assert "permission" not in done.stdout + done.stderr
    with redis.Redis.from_url(server.url) as client:
        client.hset(prefix + keys.AGENTS, "old", "{}")
        client.zadd(prefix + keys.USED, {"old": 0})
        assert asyncio.run(tidied(url, prefix)) == 1
        assert client.execute_command("ACL", "LOG") == []
        strange = [key for key in client.scan_iter("*") if not key.startswith(prefix.encode())]
    assert strange == []


async def tidied(url: str, prefix: str) -> int:
    """Forget old configurations, as workers do now and then; return how many were there."""
    opened = await open_store(load_settings(redis_url=url, prefix=prefix))
    try:
        return await opened.configs.forget_unused(opened.settings.retention)
    finally:
        await opened.aclose()


@pytest.mark.parametrize(
    "command",
    ["FLUSHALL", "CONFIG SET dir /tmp", "KEYS *", "GET another", "SHUTDOWN", "ACL LIST", "DEBUG X"],
)
def test_the_fleets_user_may_do_nothing_else(server: RedisServer, command: str) -> None:
    url = server.url.replace("redis://", f"redis://fleet:{PASSWORD}@")
    with (
        redis.Redis.from_url(url) as client,
        pytest.raises((redis.exceptions.NoPermissionError, redis.exceptions.ResponseError)),
    ):
        client.execute_command(*command.split())


def test_without_remote_control_nobody_can_stop_a_worker_and_a_cancel_arrives_all_the_same(
    model: ModelServer, start_worker: Start, redis_url: str
) -> None:
    """DIST-09: as the page starts it; the renewal of the lease tells of a cancel."""
    assert f"-- {DEAF}\n" in PAGE
    model.follow(calls)
    agents = {"STEPFLEET_AGENTS": str(FILE), "EFFECTS": "/dev/null", "STEPFLEET_LEASE": "6"}
    worker = start_worker(options=("-Q", "stepfleet,gpu", "--", DEAF), env=agents)
    with Fleet(redis_url) as fleet, Celery(broker=redis_url, set_as_current=False) as stranger:
        assert stranger.control.ping(timeout=2.0) == []
        stranger.control.shutdown()
        run_id = fleet.submit(HEAVY, "hang on")
        wait_until(lambda: any("hang" in one.key for one in model.requests), within=LONG)
        fleet.runs.cancel(run_id)
        assert fleet.runs.wait(run_id, timeout=LONG).status == "cancelled"
        assert fleet.run(HEAVY, "question") == "answer"
    assert worker.exit_code is None
