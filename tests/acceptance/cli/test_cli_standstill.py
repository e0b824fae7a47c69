"""Waits say why nothing moves: no worker, none with the agent, a Redis that is full."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import pytest
import redis
from support.deadlines import wait_until
from support.servers.redis_servers import RedisServer
from support.workers.command_line import CommandLine
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Agent, Fleet
from stepfleet.worker.testing.scenario import Reply
from stepfleet.worker.testing.server import ModelServer

LONG = 60.0


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[CommandLine]:
    made = CommandLine(tmp_path)
    yield made
    made.end()


def test_a_wait_names_the_missing_worker_and_the_full_redis_until_that_is_over(
    own_redis: Callable[..., RedisServer],
    commands: CommandLine,
    start_worker: Callable[..., FleetWorker],
    model: ModelServer,
) -> None:
    server = own_redis()
    model.follow(lambda _: Reply("done"))
    commands = CommandLine(commands.folder, STEPFLEET_REDIS_URL=server.url)
    name = commands.questions("one")
    waiting = commands.start("submit", name, "--agents", "agents.py", "--wait")
    commands.until_said("Nothing moves: no worker is alive for queue stepfleet: stepfleet worker")
    assert "--agents agents.py" in commands.said
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", "1mb")
        commands.until_said("Nothing moves: Redis is full")

        status = commands("status")
        assert "Redis is full" in status.stdout
        doctor = commands("doctor", "--json")
        found = {one["check"]: one["state"] for one in orjson.loads(doctor.stdout)}
        assert (found["Redis memory"], found["workers"]) == ("fail", "warn")

        batch = commands.said.split("Batch ")[1].split()[0]
        asking = commands.start("ask", "solver", "still?", "--agents", "agents.py")
        commands.until_said("waiting for it")
        client.config_set("maxmemory", "0")
    start_worker(server.url, env={"STEPFLEET_AGENTS": str(commands.folder / "agents.py")})
    assert waiting.wait(LONG) == 0, commands.said
    assert asking.wait(LONG) == 0, commands.said

    ended = commands("watch", batch)
    assert ended.returncode == 0
    assert "has ended" in ended.stderr


def test_python_logs_once_for_all_waits_what_they_wait_for(
    own_redis: Callable[..., RedisServer], caplog: pytest.LogCaptureFixture
) -> None:
    agent = Agent("nobodys", model="openai:scripted")
    with Fleet(own_redis().url) as fleet, caplog.at_level(logging.WARNING):
        batch = fleet.submit_batch([{"input": "one"}], agent=agent)
        run_id = fleet.submit(agent, "two")
        # A busy machine finds the reason only after the wait has ended.
        wait_until(
            lambda: ends_without(lambda: batch.wait(timeout=4.0)) and caplog.records,
            within=LONG,
            what="the reason in the log",
        )
        assert ends_without(lambda: fleet.runs.wait(run_id, 4.0))
    said = [one.getMessage() for one in caplog.records if "no worker" in one.getMessage()]
    assert said == ["no worker is alive for queue stepfleet: stepfleet worker --agents MODULE"]


def ends_without(wait: Callable[[], object]) -> bool:
    """Wait until the time is over; nothing comes of it."""
    with pytest.raises(TimeoutError):
        wait()
    return True


def test_a_wait_names_the_agent_that_no_worker_has(
    own_redis: Callable[..., RedisServer],
    start_worker: Callable[..., FleetWorker],
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = own_redis()
    with Fleet(server.url) as fleet, caplog.at_level(logging.WARNING):
        batch = fleet.submit_batch([{"input": "one"}], agent=Agent("nobodys", model="openai:x"))
        start_worker(server.url)
        wait_until(lambda: any(one.alive for one in fleet.overview().workers), within=LONG)
        progress = batch.watch()
        wait_until(
            lambda: next(progress) and "has agent 'nobodys'" in caplog.text,
            within=LONG,
            what="the agent's name in the log",
        )
        assert batch.progress().open == 1
