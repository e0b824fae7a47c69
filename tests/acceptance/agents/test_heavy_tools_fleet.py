"""Heavy tools in a fleet of real workers: own queue, own pool, no slot while waiting."""

import signal
from collections.abc import Callable
from pathlib import Path

import orjson
import psutil
import pytest
from support.deadlines import wait_until
from support.runs.lapsed_leases import leases_run_out
from support.workers.command_line import CommandLine
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Fleet
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

Start = Callable[..., FleetWorker]
FILE = Path(__file__).parents[1] / "agent_modules" / "heavy_agents.py"
HEAVY = load_agents(str(FILE))["heavy"]
LONG = 60.0


@pytest.fixture
def env(effects: Path) -> dict[str, str]:
    return {"STEPFLEET_AGENTS": str(FILE), "EFFECTS": str(effects)}


def asks_for(*names: str) -> Callable[[RequestRecord], Reply]:
    """Ask for these tools in the first turn, then answer."""

    def rules(request: RequestRecord) -> Reply:
        if request.turn > 1 or request.key.startswith("plain"):
            return Reply(f"done with {request.key}", latency=0.01)
        calls = tuple(ToolCallReply(name, {"what": request.key}) for name in names)
        return Reply("working", tool_calls=calls, latency=0.01)

    return rules


def lines(effects: Path, word: str) -> list[list[str]]:
    found = [line.split() for line in effects.read_text().splitlines()]
    return [line for line in found if line[0] == word]


def test_a_waiting_run_occupies_no_slot(
    model: ModelServer, start_worker: Start, env: dict[str, str], redis_url: str
) -> None:
    """MULTI-08: one worker with one slot serves steps and tools, and every run completes."""
    model.follow(asks_for("render", "look"))
    slot = {**env, "STEPFLEET_SLOTS": "1"}
    start_worker(options=("-Q", "stepfleet,gpu"), env=slot)
    with Fleet(redis_url) as fleet:
        given = [{"id": f"{n}", "input": f"heavy {n}"} for n in range(4)]
        results = list(fleet.submit_batch(given, agent=HEAVY).results())
    assert [result.success for result in results] == [True] * 4
    for result in results:
        assert [one.is_error for one in result.steps[0].tool_calls] == [False, False]
        assert result.lost_attempts == ()


def test_a_flood_of_long_tools_does_not_hold_up_other_runs(
    model: ModelServer,
    start_worker: Start,
    env: dict[str, str],
    effects: Path,
    tmp_path: Path,
    redis_url: str,
) -> None:
    """DIST-15, MULTI-08: steps and long tools have queues of their own."""
    model.follow(asks_for("render"))
    start_worker(name="steps", env={**env, "STEPFLEET_SLOTS": "2"})
    tools = start_worker(
        name="gpu",
        options=("-Q", "gpu", "-P", "prefork", "-c", "2"),
        env={**env, "RENDER_SECONDS": "0.2", "RENDER_UNTIL": str(tmp_path / "over")},
    )
    with Fleet(redis_url) as fleet:
        flood = fleet.submit_batch(
            [{"id": f"{n}", "input": f"heavy {n}"} for n in range(30)], agent=HEAVY
        )
        wait_until(lambda: lines(effects, "render"), within=LONG, what="the first long tool")
        plain = fleet.submit_batch(
            [{"id": f"{n}", "input": f"plain {n}"} for n in range(20)], agent=HEAVY
        )
        assert [result.success for result in plain.results()] == [True] * 20
        assert flood.progress().open == 30
        (tmp_path / "over").touch()
        flood.wait(timeout=LONG)
        results = list(flood.results())
    assert [result.success for result in results] == [True] * 30
    assert len(lines(effects, "render")) == 30
    children = {child.pid for child in psutil.Process(tools.pid).children()}
    assert {int(line[2]) for line in lines(effects, "render")} <= children
    assert all(not result.lost_attempts for result in results)
    assert all(result.steps[0].duration_ms >= 200 for result in results)


@pytest.mark.parametrize("pool", ["asyncio", pytest.param("prefork", marks=pytest.mark.long)])
def test_a_dead_tool_workers_call_is_made_again_if_it_only_reads(
    pool: str,
    model: ModelServer,
    start_worker: Start,
    env: dict[str, str],
    effects: Path,
    redis_url: str,
) -> None:
    """DIST-08, TOOL-26: lease and rescuer; what may not run twice has an unknown outcome."""
    model.follow(asks_for("render", "measure"))
    start_worker(name="steps", env=env)
    options = ("-Q", "gpu", *(("-P", "prefork", "-c", "2") if pool == "prefork" else ()))
    holds = {**env, "RENDER_SECONDS": "50"}
    victim = start_worker(name="gpu1", options=options, env=holds)
    with Fleet(redis_url) as fleet:
        run_id = fleet.submit(HEAVY, "heavy one")
        wait_until(
            lambda: lines(effects, "render") and lines(effects, "measure"),
            within=LONG,
            what="both calls under way",
        )
        victim.end()
        leases_run_out(redis_url)
        start_worker(name="gpu2", options=options, env=env)
        result = fleet.runs.wait(run_id, timeout=LONG)
    unknown, again = result.steps[0].tool_calls
    assert unknown.error is not None
    assert unknown.error.code == "OUTCOME_UNKNOWN"
    assert (again.result, again.repeated) == ("measured heavy one", True)
    assert len(lines(effects, "render")) == 1
    assert len(lines(effects, "measure")) == 2
    assert sorted(one.kind for one in result.lost_attempts) == ["crash", "crash"]


def test_a_cancel_reaches_a_tool_on_its_own_queue_at_once(
    model: ModelServer,
    start_worker: Start,
    env: dict[str, str],
    effects: Path,
    redis_url: str,
) -> None:
    """DIST-09: told by remote control; its late result is refused and listed."""
    model.follow(asks_for("endless"))
    long_lease = {**env, "STEPFLEET_LEASE": "600"}
    start_worker(name="steps", env=long_lease)
    start_worker(name="gpu", options=("-Q", "gpu"), env=long_lease)
    with Fleet(redis_url) as fleet:
        run_id = fleet.submit(HEAVY, "heavy one")
        wait_until(lambda: lines(effects, "endless"), within=LONG, what="the call under way")
        fleet.runs.cancel(run_id)
        wait_until(lambda: lines(effects, "told"), within=LONG, what="the tool broken off")
        wait_until(
            lambda: len(fleet.runs.result(run_id).lost_attempts) == 2,
            within=LONG,
            what="the ledger",
        )
        result = fleet.runs.result(run_id)
    assert result.stop_reason == "user_requested"
    assert sorted(one.kind for one in result.lost_attempts) == ["interrupted", "late"]


def test_a_tool_worker_that_stops_hands_its_call_to_another(
    model: ModelServer,
    start_worker: Start,
    env: dict[str, str],
    effects: Path,
    redis_url: str,
) -> None:
    """DIST-11: a clean stop loses nothing and counts no crash."""
    model.follow(asks_for("measure"))
    start_worker(name="steps", env=env)
    first = start_worker(
        name="gpu1",
        options=("-Q", "gpu"),
        env={**env, "RENDER_SECONDS": "50", "STEPFLEET_DRAIN": "0.5"},
    )
    with Fleet(redis_url) as fleet:
        run_id = fleet.submit(HEAVY, "heavy one")
        wait_until(lambda: lines(effects, "measure"), within=LONG, what="the call under way")
        start_worker(name="gpu2", options=("-Q", "gpu"), env=env)
        first.signal(signal.SIGTERM)
        result = fleet.runs.wait(run_id, timeout=LONG)
    assert result.success
    assert result.steps[0].tool_calls[0].result == "measured heavy one"
    assert [one.kind for one in result.lost_attempts] == ["interrupted"]


def test_a_queue_that_nobody_serves_is_reported_until_somebody_does(
    model: ModelServer, start_worker: Start, env: dict[str, str], tmp_path: Path, redis_url: str
) -> None:
    """By `doctor`, `status`, `explain` and `show`, with the queue and the command."""
    model.follow(asks_for("render"))
    # A worker counts as alive for half a lease after it has told of itself.
    told_of = {"STEPFLEET_REDIS_URL": redis_url, "STEPFLEET_LEASE": "600"}
    commands = CommandLine(tmp_path, OPENAI_BASE_URL=model.url, **told_of)

    def told() -> dict[str, dict[str, str]]:
        found = orjson.loads(commands("doctor", "--json").stdout)
        return {one["check"]: one for one in found if one["check"].startswith("queue")}

    start_worker(name="steps", env=env)
    with Fleet(redis_url) as fleet:
        wait_until(lambda: "queue gpu" in told(), within=LONG, what="the worker's report")
        assert told()["queue gpu"]["state"] == "warn"
        run_id = fleet.submit(HEAVY, "heavy one")
        wait_until(
            lambda: fleet.runs.show(run_id).header.get("wait"),
            within=LONG,
            what="the run to wait",
        )
        (gpu,) = told().values()
        assert (gpu["state"], gpu["found"]) == (
            "fail",
            "no running worker serves it: 1 run waits for a tool there",
        )
        assert "stepfleet worker --agents MODULE --queue gpu" in gpu["fix"]
        for command in ("explain", "show"):
            said = commands(command, run_id).stdout
            assert "tool 'render' on queue 'gpu', which no running worker serves" in said
        assert "no worker serves the queue gpu" in commands("status").stdout
        start_worker(name="gpu", options=("-Q", "gpu"), env=env)
        assert fleet.runs.wait(run_id, timeout=LONG).success
        wait_until(lambda: fleet.overview().unserved == {}, within=LONG, what="the worker's report")
    assert told() == {}
