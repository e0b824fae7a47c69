"""Checkpoints, forks and hand-overs on real workers, by client and command line."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest
import redis
from support.deadlines import wait_until
from support.servers.redis_servers import RedisServer, short_folder
from support.workers.command_line import CommandLine
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Fleet, Lifecycle, RunStatus, StopReason, load_checkpoint
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.records.run.facts import OriginKind
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

AGENTS = load_agents(str(Path(__file__).parents[1] / "agent_modules" / "agents.py"))
PLAIN = AGENTS["plain"]
WAIT = 60
CALM = {"STEPFLEET_LEASE": "30"}
Hold = Callable[..., tuple[threading.Event, threading.Event]]


@pytest.fixture(scope="module")
def workers(servers: tuple[RedisServer, ModelServer]) -> Iterator[list[FleetWorker]]:
    redis, model = servers
    with contextlib.ExitStack() as cleanup:
        folder = cleanup.enter_context(short_folder())
        started = [
            FleetWorker(folder, redis.url, model.url, name=f"h{n}", env=CALM) for n in (1, 2)
        ]
        for one in started:
            cleanup.callback(one.end)
        with ThreadPoolExecutor() as threads:
            list(threads.map(FleetWorker.start, started))
        yield started


@pytest.fixture
def shared(servers: tuple[RedisServer, ModelServer], workers: list[FleetWorker]) -> ModelServer:
    return servers[1]


@pytest.fixture
def fleet(servers: tuple[RedisServer, ModelServer]) -> Iterator[Fleet]:
    with Fleet(servers[0].url) as opened:
        yield opened


@pytest.fixture
def stepfleet(servers: tuple[RedisServer, ModelServer]) -> Iterator[CommandLine]:
    with short_folder() as folder:
        commands = CommandLine(folder, STEPFLEET_REDIS_URL=servers[0].url)
        try:
            yield commands
        finally:
            commands.end()


def looks(turns: int) -> Callable[[RequestRecord], Reply]:
    """Look something up in each turn but the last."""

    def rules(request: RequestRecord) -> Reply:
        text = f"turn {request.turn} by {request.body['model']}"
        if request.turn >= turns:
            return Reply(text)
        call = ToolCallReply("look", {"what": f"part {request.turn}"})
        return Reply(text, tool_calls=(call,))

    return rules


def bodies(model: ModelServer, key: str, turn: int) -> list[dict[str, object]]:
    """Return the bodies of the requests for that turn of a conversation."""
    return [dict(one.body) for one in model.requests if one.key == key and one.turn == turn]


def test_a_run_moves_to_another_redis_and_asks_the_same(
    fleet: Fleet, shared: ModelServer, stepfleet: CommandLine
) -> None:
    """CKPT-03, CKPT-04, CKPT-07: by files, on other workers; whole requests are compared."""
    shared.follow(looks(4))
    key = f"moves-{uuid4()}"
    run_id = fleet.submit(PLAIN, key, settings={"temperature": 0.25})
    ended = fleet.runs.wait(run_id, WAIT)
    done = stepfleet("checkpoints", "write", run_id, "--at", "2", "--out", "kept.json")
    assert done.returncode == 0, done.stderr
    kept = load_checkpoint(stepfleet.folder / "kept.json")
    assert len(kept.steps) == 2

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(short_folder())
        redis = RedisServer(folder).start()
        stack.callback(redis.stop)
        worker = FleetWorker(folder, redis.url, shared.url, name="far", env=CALM)
        stack.callback(worker.end)
        worker.start()
        there = stack.enter_context(Fleet(redis.url))
        assert there.history.restore(kept) == run_id
        moved = there.runs.wait(run_id, WAIT)

    for turn in (3, 4):
        first, second = bodies(shared, key, turn)
        assert first == second
    assert len(bodies(shared, key, 2)) == 1
    assert (moved.output, moved.steps_used) == (ended.output, 4)
    assert moved.usage == ended.usage
    assert moved.cost_usd == ended.cost_usd
    assert [step.worker for step in moved.steps[:2]] == [step.worker for step in ended.steps[:2]]
    elsewhere = {step.worker for step in moved.steps[2:]}
    assert not elsewhere & {step.worker for step in ended.steps}


def test_forks_go_other_ways_and_are_compared(
    fleet: Fleet, shared: ModelServer, stepfleet: CommandLine
) -> None:
    shared.follow(looks(3))
    key = f"forks-{uuid4()}"
    run_id = fleet.submit(PLAIN, key)
    first = fleet.runs.wait(run_id, WAIT)

    done = stepfleet("fork", run_id, "--at", "1", "--set", "model=openai:other")
    assert done.returncode == 0, done.stderr
    fork = done.stdout.strip()
    second = fleet.runs.wait(fork, WAIT)

    assert second.output == "turn 3 by other"
    assert second.steps[0] == first.steps[0]
    assert second.origin is not None
    assert (second.origin.kind, second.origin.run_id) == (OriginKind.FORK, run_id)
    assert len(bodies(shared, key, 1)) == 1
    told = stepfleet("compare", run_id, fork)
    assert told.returncode == 0, told.stderr
    assert "They differ from step 2: thought." in told.stdout
    assert f"fork of {run_id} at 1" in told.stdout
    assert "+turn 3 by other" in told.stdout
    data = json.loads(stepfleet("compare", run_id, fork, "--json").stdout)
    assert data["settings"] == {"model": ["openai:scripted", "openai:other"]}
    assert data["first_differing_step"] == 2


def test_a_fork_may_use_fewer_tools(fleet: Fleet, shared: ModelServer) -> None:
    shared.follow(looks(2))
    key = f"tools-{uuid4()}"
    run_id = fleet.submit(PLAIN, key)
    fleet.runs.wait(run_id, WAIT)
    fork = fleet.history.fork(run_id, at=0, tools=["look"])
    assert fleet.runs.wait(fork, WAIT).status is RunStatus.COMPLETED
    offered = [
        [tool["function"]["name"] for tool in one["tools"]]  # type: ignore[attr-defined]
        for one in bodies(shared, key, 1)
    ]
    assert offered == [["look", "effect"], ["look"]]


def test_one_agent_starts_from_the_result_of_another(fleet: Fleet, shared: ModelServer) -> None:
    """MULTI-01: fetched by its run id, by another client."""
    shared.follow(looks(2))
    first = fleet.submit(PLAIN, f"from-{uuid4()}")
    fleet.runs.wait(first, WAIT)

    second = fleet.submit(AGENTS["strict"], fleet.runs.result(first))

    result = fleet.runs.wait(second, WAIT)
    asked = fleet.runs.show(second).state.messages[0]
    assert (asked.role.value, asked.text) == ("user", "turn 2 by scripted")
    assert result.agent_name == "strict"
    assert result.origin is not None
    assert (result.origin.kind, result.origin.run_id) == (OriginKind.RESULT, first)


def test_a_child_names_its_parent_in_state_events_and_result(
    fleet: Fleet, shared: ModelServer
) -> None:
    """MULTI-02"""
    shared.follow(looks(2))
    parent = fleet.submit(PLAIN, f"parent-{uuid4()}")
    child = fleet.submit(PLAIN, f"child-{uuid4()}", parent=parent)
    assert fleet.runs.wait(child, WAIT).parent_agent_id == parent
    assert fleet.runs.show(child).state.parent_agent_id == parent
    events = list(fleet.runs.events(child))
    assert len(events) > 4
    assert {event["parent_agent_id"] for event in events} == {parent}
    fleet.runs.wait(parent, WAIT)
    assert {"parent_agent_id" in event for event in fleet.runs.events(parent)} == {False}


def test_a_run_that_stopped_at_its_limit_goes_on_with_a_higher_one(
    fleet: Fleet, shared: ModelServer
) -> None:
    """CKPT-16: as itself, and as a copy from its checkpoint."""
    shared.follow(looks(5))
    run_id = fleet.submit(PLAIN, f"limit-{uuid4()}", max_steps=3)
    assert fleet.runs.wait(run_id, WAIT).stop_reason is StopReason.STEPS_LIMIT
    copy = fleet.history.restore(fleet.history.checkpoint(run_id), run_id=str(uuid4()))
    assert fleet.runs.result(copy).stop_reason is StopReason.STEPS_LIMIT
    for one in (run_id, copy):
        assert fleet.runs.retry(one, max_steps=6).outcome == "retried"
        result = fleet.runs.wait(one, WAIT)
        assert (result.status, result.steps_used) == (RunStatus.COMPLETED, 5)


def test_a_paused_run_outlives_all_workers_and_goes_on_by_its_id(
    own_redis: Callable[..., RedisServer], model: ModelServer, tmp_path: Path, hold: Hold
) -> None:
    """CKPT-10, CKPT-11: history and counters are whole; an hour between counts for no clock."""
    asked, paused = hold(looks(4), 1)
    url = own_redis().url
    with contextlib.ExitStack() as stack, Fleet(url) as fleet:
        first = FleetWorker(tmp_path, url, model.url, name="first", env=CALM)
        stack.callback(first.end)
        first.start()
        run_id = fleet.submit(PLAIN, "outlives", time_limit=60)
        assert asked.wait(WAIT), "nobody asked for the first turn"
        assert fleet.runs.pause(run_id).outcome == "requested"
        paused.set()
        wait_until(
            lambda: fleet.runs.show(run_id).state.status is Lifecycle.PAUSED,
            within=WAIT,
            what="the pause",
        )
        first.end()
        before = fleet.history.checkpoint(run_id)
        assert len(before.steps) == 1
        an_hour_passes(url, run_id)
        second = FleetWorker(tmp_path, url, model.url, name="second", env=CALM)
        stack.callback(second.end)
        second.start()
        assert fleet.runs.resume(run_id).outcome == "resumed"
        result = fleet.runs.wait(run_id, WAIT)
        after = fleet.history.checkpoint(run_id)
    assert (result.status, result.steps_used) == (RunStatus.COMPLETED, 4)
    assert after.steps[:1] == before.steps
    history = before.conversation_history
    assert after.conversation_history[: len(history)] == history
    assert len({step.worker for step in result.steps}) == 2
    seconds = sum(step.duration_ms for step in result.steps) / 1000
    assert result.cumulative_execution_seconds == pytest.approx(seconds)


def an_hour_passes(url: str, run_id: str) -> None:
    """Move what is stamped on a run an hour back."""
    with redis.Redis.from_url(url) as client:
        (key,) = client.scan_iter(f"*:run:{run_id}")
        for field in ("created", "execution_started", "updated"):
            assert client.hexists(key, field)
            client.hincrby(key, field, -3_600_000)


def test_costs_are_asked_for_by_a_client_over_two_sessions(
    fleet: Fleet, shared: ModelServer
) -> None:
    """COST-10, COST-11: what is told equals what the runs' totals say."""
    shared.follow(looks(2))
    run_id = fleet.submit(PLAIN, f"costs-{uuid4()}")
    first = fleet.runs.wait(run_id, WAIT)
    copy = fleet.history.restore(fleet.history.checkpoint(run_id), run_id=str(uuid4()))
    fleet.runs.send(copy, "and now?")
    second = fleet.runs.wait(copy, WAIT)
    told = fleet.history.get_cost_stats(copy)
    assert told.total_calls == 3
    assert told.total_cost == pytest.approx(second.cost_usd)
    assert told.total_cost > fleet.history.get_cost_stats(run_id).total_cost > 0
    assert first.cost_usd == pytest.approx(fleet.history.get_cost_stats(run_id).total_cost)
    summary = fleet.history.get_cost_summary(copy)
    assert f"3 calls, {told.total_tokens:,} tokens, {told.total_cost:.6f} USD" in summary
    assert told.by_model.keys() == {"scripted"}
    fleet.history.reset_cost_tracking(copy)
    assert fleet.history.get_cost_stats(copy).total_calls == 0
    assert fleet.history.get_cost_stats(run_id).total_calls == 2
    assert fleet.runs.result(copy).cost_usd == pytest.approx(second.cost_usd)


def test_the_command_line_keeps_and_restores(
    fleet: Fleet, shared: ModelServer, stepfleet: CommandLine
) -> None:
    """CKPT-05, SER-03"""
    shared.follow(looks(6))
    run_id = fleet.submit(PLAIN, f"kept-{uuid4()}")
    done = stepfleet(
        *("checkpoint", run_id, "--every", "2", "--keep", "2", "--follow", "--out", "folder")
    )
    assert done.returncode == 0, done.stderr
    kept = sorted(path.name for path in (stepfleet.folder / "folder").iterdir())
    assert kept == [f"{run_id}-000004.json", f"{run_id}-000006.json"]

    refused = stepfleet("checkpoints", "restore", f"folder/{kept[0]}")
    assert refused.returncode == 2
    assert "is there already; restore a copy with an id of its own: --as-new" in refused.stderr
    copied = stepfleet("restore", f"folder/{kept[0]}", "--as-new", "--json")
    assert copied.returncode == 0, copied.stderr
    copy = json.loads(copied.stdout)["run_id"]
    assert fleet.runs.wait(copy, WAIT).steps_used == 6

    snapshot = json.loads(stepfleet("snapshot", copy, "--preset", "minimal", "--redact").stdout)
    assert (snapshot["agent_id"], snapshot["steps"]) == (copy, [])
    assert "part 1" not in json.dumps(snapshot)
    wrong = stepfleet("fork", run_id, "--set", "max_steps")
    assert (wrong.returncode, "--set max_steps: write FIELD=VALUE" in wrong.stderr) == (2, True)
