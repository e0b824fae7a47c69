"""Fleets of real workers on a real Redis Cluster, with a broker beside it."""

import signal
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.deadlines import wait_until
from support.servers.rabbit_server import RabbitServer
from support.servers.redis_cluster import RedisCluster, redis_cluster
from support.servers.redis_servers import RedisServer, short_folder
from support.workers.busy_runs import NO_LIMITS, Busy
from support.workers.fleet_workers import AGENTS as AGENTS_FILE
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import AgentRunResult, Fleet, RunStatus
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.server import ModelServer

Start = Callable[..., FleetWorker]
AGENTS = load_agents(str(AGENTS_FILE))
TURNS = 4
RUNS = 40
QUICK = {"STEPFLEET_LEASE": "2"}


@pytest.fixture
def cluster() -> Iterator[RedisCluster]:
    with redis_cluster(replicas=1) as made:
        yield made


@pytest.fixture
def redis_url(
    cluster: RedisCluster, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> str:
    """The cluster's address; the broker is the session's Redis."""
    redis_server.flush()
    monkeypatch.setenv("STEPFLEET_BROKER_URL", redis_server.url)
    return cluster.url


@pytest.fixture
def busy(model: ModelServer) -> Busy:
    rules = Busy(turns=TURNS, latency=0.02)
    model.follow(rules)
    return rules


def lines() -> list[dict[str, Any]]:
    return [{"id": f"r{n}", "input": f"question {n}"} for n in range(RUNS)]


def check_all(results: list[AgentRunResult]) -> int:
    """Every run is complete and without a gap; return how many steps they have."""
    assert len(results) == RUNS
    for result in results:
        assert result.status is RunStatus.COMPLETED, result.summary()
        assert [step.step for step in result.steps] == list(range(1, len(result.steps) + 1))
        assert result.output == f"answer to question {str(result.line_id)[1:]}"
    return sum(len(result.steps) for result in results)


def test_a_batch_survives_a_reshard_and_the_death_of_a_worker(
    cluster: RedisCluster, start_worker: Start, fleet: Fleet, busy: Busy
) -> None:
    """DIST-06, DIST-08: `redis-cli --cluster reshard` takes a third of the slots away meanwhile."""
    victim = start_worker(name="victim", env=QUICK)
    heir = start_worker(name="heir", env=QUICK)
    batch = fleet.submit_batch(lines(), agent=AGENTS["plain"], **NO_LIMITS)
    wait_until(lambda: batch.progress().steps >= 10, within=60, what="work under way")
    source, to = cluster.masters[:2]
    moving = reshard(cluster, source, to, slots=5461)
    victim.signal(signal.SIGKILL)
    assert batch.progress().open == RUNS
    busy.struck.set()
    steps = check_all(list(batch.results()))
    told, _ = moving.communicate(timeout=100)
    assert moving.returncode == 0, told.decode()[-2000:]
    assert not cluster.slots_of(source)
    progress = batch.progress()
    assert (progress.completed, progress.steps) == (RUNS, steps)
    assert heir.exit_code is None
    assert "Traceback" not in heir.log


def reshard(
    cluster: RedisCluster, source: RedisServer, to: RedisServer, *, slots: int
) -> "subprocess.Popen[bytes]":
    """Begin to move slots as an operator would."""
    command = [
        *("redis-cli", "--cluster", "reshard", f"127.0.0.1:{source.port}"),
        *("--cluster-from", cluster.id_of(source), "--cluster-to", cluster.id_of(to)),
        *("--cluster-slots", str(slots), "--cluster-yes", "--cluster-pipeline", "100"),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def test_a_batch_survives_the_death_of_a_master(
    cluster: RedisCluster, start_worker: Start, fleet: Fleet, busy: Busy
) -> None:
    """Its replica follows; what was acknowledged and not replicated is done again."""
    worker = start_worker(env=QUICK)
    batch = fleet.submit_batch(lines(), agent=AGENTS["plain"], **NO_LIMITS)
    wait_until(lambda: batch.progress().steps >= 10, within=60, what="work under way")
    cluster.replicated()
    assert batch.progress().open == RUNS
    cluster.masters[0].kill()
    busy.struck.set()
    check_all(list(batch.results()))
    assert worker.log.count("Redis does not answer") <= 1
    assert cluster.owner(0) is cluster.replicas[0]


@pytest.fixture
def rabbit() -> Iterator[RabbitServer]:
    with short_folder() as folder:
        server = RabbitServer(folder)
        try:
            yield server.start()
        finally:
            server.end()


@pytest.mark.rabbitmq
def test_rabbitmq_carries_the_messages_of_a_fleet_on_a_cluster(
    cluster: RedisCluster,
    rabbit: RabbitServer,
    start_worker: Start,
    busy: Busy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DIST-06: published behind each commit, as to every broker that is not the store."""
    monkeypatch.setenv("STEPFLEET_BROKER_URL", rabbit.url)
    busy.struck.set()
    with Fleet(cluster.url) as fleet:
        start_worker(url=cluster.url)
        batch = fleet.submit_batch(lines(), agent=AGENTS["plain"])
        check_all(list(batch.results()))
        assert fleet.overview().queue_length == 0
