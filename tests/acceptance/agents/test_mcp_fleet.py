"""Tools of MCP servers in a fleet of real workers; the client has no server."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.deadlines import wait_until
from support.runs.lapsed_leases import leases_run_out
from support.servers.redis_servers import free_port
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import ConfigurationError, Fleet, mcp_server
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

Start = Callable[..., FleetWorker]
FILE = Path(__file__).parents[1] / "agent_modules" / "mcp_agents.py"
TALKER = Path(__file__).parents[2] / "support" / "servers" / "mcp_talker.py"
AGENTS = load_agents(str(FILE))
LONG = 90.0


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    file = tmp_path / "notes"
    file.touch()
    return file


@pytest.fixture
def env(notes: Path) -> dict[str, str]:
    return {"STEPFLEET_AGENTS": str(FILE), "NOTES": str(notes), "SERVER_KEY": "for the server"}


def lines(notes: Path, word: str) -> list[str]:
    return [line for line in notes.read_text().splitlines() if line.split()[0] == word]


def asks(*calls: ToolCallReply) -> Callable[[RequestRecord], Reply]:
    """Ask for these calls in the first turn, then answer with their results."""

    def rules(request: RequestRecord) -> Reply:
        if request.turn > 1:
            return Reply(" | ".join(str(one.content) for one in request.answers), latency=0.01)
        return Reply("", tool_calls=calls, latency=0.01)

    return rules


@pytest.mark.parametrize("pool", ["asyncio", pytest.param("prefork", marks=pytest.mark.long)])
def test_workers_offer_their_servers_tools_and_call_them(
    pool: str,
    model: ModelServer,
    start_worker: Start,
    env: dict[str, str],
    notes: Path,
    redis_url: str,
) -> None:
    """TOOL-19, TOOL-23: a run keeps names and digests; the client knows no server."""
    seen: list[tuple[str, ...]] = []

    def rules(request: RequestRecord) -> Reply:
        seen.append(request.tools)
        number = int(request.question)
        if request.turn > 1:
            return Reply(" | ".join(str(one.content) for one in request.answers), latency=0.01)
        return Reply(
            "",
            tool_calls=(
                ToolCallReply("add", {"a": number, "b": 1}),
                ToolCallReply("person", {"name": "Ada"}),
                ToolCallReply("talker__person", {"name": "Ada"}),
                ToolCallReply("variable", {"name": "SERVER_KEY"}),
                ToolCallReply("variable", {"name": "OPENAI_API_KEY"}),
            ),
            latency=0.01,
        )

    model.follow(rules)
    options = ("-P", "prefork", "-c", "1") if pool == "prefork" else ()
    for name in ("w1", "w2"):
        start_worker(name=name, env=env, options=options)
    with Fleet(redis_url) as fleet:
        given = [{"id": f"{n}", "input": f"{n}"} for n in range(30)]
        results = list(fleet.submit_batch(given, agent=AGENTS["near"]).results(ordered=True))
    person = json.dumps({"name": "Ada", "age": 42})
    for number, result in enumerate(results):
        wanted = f"{number + 1} | own Ada | {person} | for the server | unset"
        assert result.output == wanted, result.error
        added, own, *_ = result.steps[0].tool_calls
        assert len(str(added.version)) == 16
        assert own.version is None
    assert all("strange_name_of_a_tool" in names for names in seen)
    assert len(lines(notes, "started")) <= 2
    assert len(lines(notes, "add")) == 30


def test_an_image_of_a_tool_is_shown_to_the_model_behind_the_results(
    model: ModelServer, start_worker: Start, env: dict[str, str], redis_url: str
) -> None:
    shown: list[object] = []

    def rules(request: RequestRecord) -> Reply:
        if request.turn == 1:
            calls = ToolCallReply("plot", {}), ToolCallReply("add", {"a": 1, "b": 1})
            return Reply("", tool_calls=calls, latency=0.01)
        shown.extend(request.messages[-3:])
        return Reply("nice", latency=0.01)

    model.follow(rules)
    start_worker(env=env)
    with Fleet(redis_url) as fleet:
        run_id = fleet.submit(AGENTS["near"], "draw")
        assert fleet.runs.wait(run_id, timeout=LONG).success
    drawn, added, images = shown
    assert isinstance(drawn, dict)
    assert isinstance(added, dict)
    assert isinstance(images, dict)
    assert (drawn["role"], added["role"], images["role"]) == ("tool", "tool", "user")
    assert [part["type"] for part in images["content"]] == ["text", "image_url"]
    assert images["content"][1]["image_url"]["url"].startswith("data:image/png;base64,iVBOR")


def test_runs_wait_for_a_server_that_is_away_and_go_on_when_it_is_there(
    model: ModelServer, start_worker: Start, env: dict[str, str], notes: Path, redis_url: str
) -> None:
    """The step is tried again as after any transient failure, and holds no slot meanwhile."""
    model.follow(asks(ToolCallReply("add", {"a": 1, "b": 2})))
    port = free_port()
    start_worker(env={**env, "TALKER_URL": f"http://127.0.0.1:{port}/mcp"})
    with Fleet(redis_url) as fleet:
        run_id = fleet.submit(AGENTS["far"], "add")
        wait_until(lambda: fleet.runs.result(run_id).lost_attempts, within=LONG, what="an attempt")
        (first, *_) = fleet.runs.result(run_id).lost_attempts
        server = subprocess.Popen(
            [sys.executable, str(TALKER), "http", str(port)], env={**os.environ, **env}
        )
        try:
            result = fleet.runs.wait(run_id, timeout=LONG)
        finally:
            server.kill()
            server.wait()
    assert "MCP server 'talker' is away" in (first.reason or "")
    assert (result.success, result.output) == (True, "3")


def test_a_killed_workers_calls_are_made_again_only_where_they_may(
    model: ModelServer,
    start_worker: Start,
    env: dict[str, str],
    notes: Path,
    redis_url: str,
    tmp_path: Path,
) -> None:
    """TOOL-26: and the killed worker's server ends with it."""
    struck = tmp_path / "struck"
    model.follow(asks(ToolCallReply("look", {"until": str(struck)})))
    victim = start_worker(name="victim", env=env)
    with Fleet(redis_url) as fleet:
        run_id = fleet.submit(AGENTS["near"], "look")
        wait_until(lambda: lines(notes, "look"), within=LONG, what="the call under way")
        (pid,) = (int(line.split()[1]) for line in lines(notes, "started"))
        victim.signal(signal.SIGKILL)
        victim.wait(within=LONG)
        struck.touch()
        leases_run_out(redis_url)
        start_worker(name="heir", env=env)
        result = fleet.runs.wait(run_id, timeout=LONG)
    (record,) = result.steps[0].tool_calls
    assert (record.result, record.repeated) == ("seen", True)
    keys = {line.split()[1] for line in lines(notes, "look") if "cancelled" not in line}
    assert len(keys) == 1
    wait_until(lambda: not psutil.pid_exists(pid), within=LONG, what="the server's end")


def test_a_worker_that_stops_ends_its_servers(
    model: ModelServer, start_worker: Start, env: dict[str, str], notes: Path, redis_url: str
) -> None:
    model.follow(asks(ToolCallReply("add", {"a": 1, "b": 2})))
    worker = start_worker(env=env)
    with Fleet(redis_url) as fleet:
        assert fleet.runs.wait(fleet.submit(AGENTS["near"], "add"), timeout=LONG).success
    (pid,) = (int(line.split()[1]) for line in lines(notes, "started"))
    worker.signal(signal.SIGTERM)
    worker.wait(within=LONG)
    wait_until(lambda: not psutil.pid_exists(pid), within=LONG, what="the server's end")


def test_a_server_that_the_workers_agent_lacks_is_an_error_where_it_is_submitted(
    model: ModelServer, start_worker: Start, env: dict[str, str], redis_url: str
) -> None:
    """TOOL-23"""
    model.follow(asks(ToolCallReply("add", {"a": 1, "b": 2})))
    start_worker(env=env)
    near = AGENTS["near"]
    other = type(near)(
        "near", model="openai:scripted", tools=[*near.tools, mcp_server("new", command=["x"])]
    )
    with Fleet(redis_url) as fleet:
        assert fleet.runs.wait(fleet.submit(near, "add"), timeout=LONG).success
        with pytest.raises(ConfigurationError, match="has no MCP server 'new'"):
            fleet.submit(other, "hello")
