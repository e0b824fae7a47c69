"""A real worker whose Redis is in trouble: it waits, says so once, goes on, and loses nothing."""

import contextlib
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from support.deadlines import wait_until
from support.servers.redis_servers import RedisServer
from support.servers.trouble_proxy import TroubleProxy, troubled
from support.workers.busy_runs import NO_LIMITS, Busy
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import AgentRunResult, Fleet, RunStatus
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.server import ModelServer

LONG = 60.0
Start = Callable[..., FleetWorker]
AGENTS = load_agents(str(Path(__file__).parents[1] / "agent_modules" / "agents.py"))
TURNS = 3
RUNS = 20
PER_PERIOD = 40
"""Attempts of one worker (both its connections) in a second without Redis, at most."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A worker in the middle of a batch, behind a proxy; the fleet's client goes past it."""

    server: RedisServer
    proxy: TroubleProxy
    worker: FleetWorker
    fleet: Fleet
    batch: Any
    model: ModelServer
    busy: Busy
    effects: Path

    def client(self) -> redis.Redis:
        return redis.Redis(
            port=self.server.port, decode_responses=True, retry=Retry(NoBackoff(), 0)
        )

    def said(self, what: str) -> int:
        return self.worker.log.count(what)

    @property
    def warnings(self) -> str:
        """The worker's log without what it says of tasks that went well."""
        lines = self.worker.log.splitlines()
        return "\n".join(line for line in lines if ": INFO/" not in line)

    def has_heard(self, *said: str) -> None:
        wait_until(lambda: all(self.said(one) for one in said), within=LONG, what=str(said))

    def check_all(self) -> list[AgentRunResult]:
        """Let all runs end: nothing was lost or done twice; what was paid for twice is listed."""
        self.busy.struck.set()
        results = list(self.batch.results())
        for result in results:
            assert result.status is RunStatus.COMPLETED, result.summary()
            done_steps = [step.step for step in result.steps]
            told = f"{result.steps!r}"
            assert len(done_steps) >= TURNS
            expected = list(range(1, len(done_steps) + 1))
            assert done_steps == expected, (told, result.lost_attempts)
            assert result.output == f"answer to question {str(result.line_id)[1:]}"
        done = Counter(line.split()[2] for line in self.effects.read_text().splitlines())
        assert set(done.values()) == {1}
        steps = sum(len(result.steps) for result in results)
        assert len(done) == steps - RUNS
        lost = [one for result in results for one in result.lost_attempts]
        again = sum(one.ambiguous for one in lost)
        assert steps <= len(self.model.requests) <= steps + again, (lost, self.warnings)
        assert again <= RUNS // 2, (lost, self.warnings)
        assert self.worker.exit_code is None
        return results


Play = Callable[..., "contextlib.AbstractContextManager[Scene]"]


@pytest.fixture
def scene(
    own_redis: Callable[..., RedisServer], start_worker: Start, model: ModelServer, tmp_path: Path
) -> Iterator[Callable[..., Scene]]:
    """Begin a batch: `scene(transport="stock")`, with settings of redis.conf as `redis=...`."""
    effects = tmp_path / "effects"
    effects.touch()
    with contextlib.ExitStack() as cleanup:

        def begin(redis: dict[str, str] | None = None, **settings: str) -> Scene:
            busy = Busy("effect", turns=TURNS, latency=0.2)
            model.follow(busy)
            server = own_redis(**(redis or {}))
            proxy = cleanup.enter_context(troubled(server.port))
            env = {f"STEPFLEET_{name.upper()}": value for name, value in settings.items()}
            env = {"STEPFLEET_LEASE": "2", "EFFECTS": str(effects), **env}
            worker = start_worker(proxy.url, env=env)
            fleet = cleanup.enter_context(Fleet(server.url))
            lines = [{"id": f"r{n}", "input": f"question {n}"} for n in range(RUNS)]
            batch = fleet.submit_batch(lines, agent=AGENTS["plain"], **NO_LIMITS)
            wait_until(lambda: batch.progress().steps >= 5, within=LONG, what="some steps")
            assert batch.progress().open == RUNS
            return Scene(server, proxy, worker, fleet, batch, model, busy, effects)

        yield begin


@pytest.mark.parametrize("transport", ["batch", "stock"])
def test_a_worker_that_loses_its_redis_waits_for_it_and_keeps_its_answers(
    scene: Callable[..., Scene], transport: str
) -> None:
    """Longer than its patience and its leases; the answers that came meanwhile are kept."""
    now = scene(transport=transport, patience="1")
    now.proxy.cut()
    before = now.proxy.connections
    now.has_heard("Redis does not answer", "The broker does not answer")
    wait_until(lambda: now.proxy.connections > before + 8, within=LONG, what="looks for Redis")
    wait_until(lambda: _is_overdue(now), within=LONG, what="leases that ran out")
    now.proxy.heal()
    now.check_all()
    now.has_heard("Redis answers again", "The broker answers again")
    assert now.said("waiting for it") == 2
    assert now.said("Traceback") == 0, now.warnings
    # A loaded machine stops a loop for half of this short lease, and the worker says so.
    errors = [line for line in now.worker.log.splitlines() if "ERROR/" in line]
    assert [line for line in errors if "event loop" not in line] == []


def test_a_worker_does_not_spin_while_redis_is_away(scene: Callable[..., Scene]) -> None:
    """Counted, not timed: while one thing looks for Redis n times, all things look 10 n times."""
    now = scene()
    now.proxy.cut()
    now.has_heard("Redis does not answer", "The broker does not answer")
    with now.client() as client:
        start, began = now.proxy.attempts, _seconds(client)
        wait_until(lambda: _seconds(client) >= began + 5, within=60, what="five seconds")
        assert now.proxy.attempts - start < PER_PERIOD * (_seconds(client) - began)
    now.proxy.heal()
    now.check_all()


def test_a_worker_of_a_full_redis_waits_until_there_is_room(scene: Callable[..., Scene]) -> None:
    now = scene()
    with now.client() as client:
        start, began = _commands(client), _seconds(client)
        client.config_set("maxmemory", "1mb")
        now.has_heard("Redis refuses commands")
        wait_until(lambda: _seconds(client) >= began + 4, within=60, what="four seconds")
        # rescuer, leases, fetches and our own two questions at each look are among them
        assert _refusals(client, "OOM") < 15 * RUNS * (_seconds(client) - began)
        assert _commands(client) - start < 1000 * (_seconds(client) - began)
        client.config_set("maxmemory", "0")
    now.check_all()
    assert now.said("waiting for it") == 1
    assert now.said("Traceback") == 0, now.warnings


def test_a_worker_of_a_read_only_replica_waits_until_it_is_master_again(
    scene: Callable[..., Scene],
) -> None:
    now = scene()
    with now.client() as client:
        began = _seconds(client)
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        now.has_heard("Redis takes no writes here", "The broker takes no writes here")
        wait_until(lambda: _seconds(client) >= began + 4, within=60, what="four seconds")
        assert _refusals(client, "READONLY") < 15 * RUNS * (_seconds(client) - began)
        client.execute_command("REPLICAOF", "NO", "ONE")
    now.check_all()
    assert now.said("waiting for it") == 2
    assert now.said("Traceback") == 0, now.warnings


def test_scripts_that_are_flushed_again_and_again_cost_nothing(
    scene: Callable[..., Scene],
) -> None:
    now = scene()
    now.busy.struck.set()
    with now.client() as client:
        while now.batch.progress().completed < RUNS:
            client.script_flush()
    now.check_all()
    assert now.said("waiting for it") == 0
    assert now.said("Traceback") == 0, now.warnings


def test_a_worker_whose_redis_is_away_ends_within_its_drain_when_it_is_stopped(
    scene: Callable[..., Scene], start_worker: Start
) -> None:
    """What it could not hand back is taken up when its leases have run out."""
    now = scene()
    now.proxy.cut()
    now.has_heard("Redis does not answer", "The broker does not answer")
    now.worker.signal(signal.SIGTERM)
    assert now.worker.wait(within=LONG) == 0, now.worker.log[-3000:]
    now.busy.struck.set()
    start_worker(now.server.url, name="heir", env={"EFFECTS": str(now.effects)})
    results = list(now.batch.results())
    assert [result.status for result in results] == [RunStatus.COMPLETED] * RUNS
    for result in results:
        assert [step.step for step in result.steps] == list(range(1, len(result.steps) + 1))


def _is_overdue(now: Scene) -> bool:
    return now.fleet.overview().oldest_due_seconds > 0


def _seconds(client: redis.Redis) -> float:
    return float(client.time()[0])


def _commands(client: redis.Redis) -> int:
    return int(client.info("stats")["total_commands_processed"])


def _refusals(client: redis.Redis, kind: str) -> int:
    return int(client.info("errorstats").get(f"errorstat_{kind}", {}).get("count", 0))
