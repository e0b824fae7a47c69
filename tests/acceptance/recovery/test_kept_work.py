"""What a worker holds it keeps: hints for its own work, a blocked loop, a stop in mid-claim."""

from collections.abc import Callable
from pathlib import Path

import redis
from support.deadlines import wait_until
from support.runs.lapsed_leases import leases_run_out
from support.workers.fleet_workers import AGENTS, FleetWorker

from stepfleet.orchestrator import Fleet
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.store import keys
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

Start = Callable[..., FleetWorker]
FOLDER = Path(__file__).parents[1] / "agent_modules"
PLAIN = load_agents(str(AGENTS))["plain"]
HEAVY = load_agents(str(FOLDER / "heavy_agents.py"))["heavy"]
STUBBORN = load_agents(str(FOLDER / "stubborn_agents.py"))["stubborn"]
LONG = 60.0
RUNS = 10
HEADER = 3
"""Colons in the key of a run's header."""


def now_ms(redis_url: str) -> int:
    with redis.Redis.from_url(redis_url) as client:
        return int(client.time()[0]) * 1000


def leased_beyond(redis_url: str, moment: int) -> int:
    """Return how many runs have a lease that lasts beyond `moment`, in ms."""
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        headers = [key for key in client.scan_iter("sf:{*}:run:*") if key.count(":") == HEADER]
        return sum(int(client.hget(key, "lease") or 0) > moment for key in headers)


def test_a_worker_does_not_begin_again_what_it_holds_itself(
    model: ModelServer, start_worker: Start, fleet: Fleet, redis_url: str
) -> None:
    """As a Redis sees it whose clock was set forward: every lease is over at once."""
    model.follow(lambda _: Reply("answer", latency=600.0))
    worker = start_worker()
    fleet.submit_batch([{"input": f"question {n}"} for n in range(RUNS)], agent=PLAIN)
    wait_until(lambda: len(model.requests) == RUNS, within=LONG, what="the calls under way")

    leases_run_out(redis_url)

    def is_over() -> bool:
        return worker.log.count("dropped: leased") >= RUNS or len(model.requests) > RUNS

    wait_until(is_over, within=LONG, what="the hints' refusal")
    assert len(model.requests) == RUNS
    assert leased_beyond(redis_url, now_ms(redis_url)) == RUNS


def test_a_worker_does_not_start_a_heavy_tool_again_that_it_runs(
    model: ModelServer, start_worker: Start, fleet: Fleet, redis_url: str, tmp_path: Path
) -> None:
    effects = tmp_path / "effects"
    effects.touch()
    call = ToolCallReply("measure", {"what": "it"})
    model.follow(lambda _: Reply(tool_calls=(call,)))
    agents = {"STEPFLEET_AGENTS": str(FOLDER / "heavy_agents.py"), "EFFECTS": str(effects)}
    env = {**agents, "RENDER_SECONDS": "600"}
    worker = start_worker(options=("-Q", "stepfleet,gpu"), env=env)
    fleet.submit(HEAVY, "one")
    wait_until(effects.read_text, within=LONG, what="the tool under way")

    leases_run_out(redis_url)

    def is_over() -> bool:
        return "dropped: leased" in worker.log or effects.read_text().count("measure") > 1

    wait_until(is_over, within=LONG, what="the hint's refusal")
    assert effects.read_text().count("measure") == 1


def test_a_blocked_loop_keeps_its_work_for_as_long_as_the_setting_says(
    model: ModelServer, start_worker: Start, fleet: Fleet, redis_url: str, tmp_path: Path
) -> None:
    """Nobody takes over what it holds, and the log shows what blocks it."""
    effects = tmp_path / "effects"
    call = ToolCallReply("cling", {"what": "it"})

    def rules(request: RequestRecord) -> Reply:
        if request.key == "stuck":
            return Reply(tool_calls=(call,))
        return Reply("answer", latency=600.0)

    model.follow(rules)
    agents = {
        "STEPFLEET_AGENTS": f"{FOLDER / 'stubborn_agents.py'},{AGENTS}",
        "EFFECTS": str(effects),
    }
    env = {**agents, "STEPFLEET_LEASE": "2", "STEPFLEET_BLOCKED_LIMIT": "8"}
    blocked = start_worker(name="blocked", env=env)
    fleet.submit_batch([{"input": f"question {n}"} for n in range(RUNS)], agent=PLAIN)
    wait_until(lambda: len(model.requests) == RUNS, within=LONG, what="the calls under way")
    fleet.submit(STUBBORN, "stuck")
    wait_until(effects.exists, within=LONG, what="the tool that blocks the loop")
    two_leases_on = now_ms(redis_url) + 4000

    def is_renewed() -> bool:
        return leased_beyond(redis_url, two_leases_on) == RUNS + 1

    wait_until(is_renewed, within=LONG, what="renewals while the loop is blocked")
    assert len(model.requests) == RUNS + 1
    asked = len(model.requests)
    # On a busy machine the loop may be late before the tool begins: the first words show that.
    blocker, given_up = "threading.Event().wait(600)", "its leases are left"
    wait_until(lambda: blocker in blocked.log, within=LONG, what="what blocks the loop")
    wait_until(lambda: given_up in blocked.log, within=LONG, what="the end of its patience")
    start_worker(name="heir", env=env)
    wait_until(lambda: len(model.requests) >= asked + RUNS, within=LONG, what="the heir at work")


def test_children_that_end_take_their_leave(
    model: ModelServer, start_worker: Start, fleet: Fleet, redis_url: str
) -> None:
    """A pool that replaces its children fills no list of workers."""
    model.follow(lambda _: Reply("answer"))
    start_worker(options=("-P", "prefork", "-c", "1", "--max-tasks-per-child", "1"))
    batch = fleet.submit_batch([{"input": f"question {n}"} for n in range(3)], agent=PLAIN)
    wait_until(lambda: not batch.progress().open, within=LONG, what="the end of the batch")
    with redis.Redis.from_url(redis_url) as client:
        wait_until(lambda: client.hlen(keys.WORKERS) == 1, within=LONG, what="one worker alone")
