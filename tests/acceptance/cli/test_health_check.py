"""The probe of containers: `stepfleet doctor --live`, wherever the settings' Redis is."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager

import pytest
import redis
from support.deadlines import wait_until
from support.servers.redis_cluster import redis_cluster
from support.servers.redis_servers import RedisServer, free_port
from support.servers.sentinel_fleet import sentinel_fleet
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator.store.keys import KEEPERS, WORKERS

Start = Callable[..., FleetWorker]
Place = Callable[[RedisServer], AbstractContextManager[dict[str, str]]]
PROBE = ("-m", "stepfleet.orchestrator.cli", "doctor", "--live")
LONG = 60.0


def checked(variables: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *PROBE],
        env={**os.environ, **variables},
        check=False,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stderr


@contextmanager
def _sentinels(_: RedisServer) -> Iterator[dict[str, str]]:
    own = ("requirepass watchword",)
    with sentinel_fleet(sentinels=own, requirepass="geheim") as made:
        yield {"STEPFLEET_REDIS_URL": f"{made.url}?sentinel_password=watchword"}


@contextmanager
def _cluster(server: RedisServer) -> Iterator[dict[str, str]]:
    with redis_cluster() as made:
        yield {"STEPFLEET_REDIS_URL": made.url, "STEPFLEET_BROKER_URL": server.url}


@pytest.mark.parametrize("place", [_sentinels, _cluster])
def test_a_worker_that_answers_is_well_behind_sentinels_and_on_a_cluster(
    place: Place, redis_url: str, redis_server: RedisServer, start_worker: Start
) -> None:
    with place(redis_server) as variables:
        worker = start_worker(
            variables["STEPFLEET_REDIS_URL"],
            env=variables,
        )
        wait_until(lambda: checked(variables)[0] == 0, within=LONG, what="the worker's health")
        worker.end()


def test_a_host_without_a_living_worker_is_reported_and_a_redis_that_is_away_is_not_its_fault(
    redis_url: str, redis_server: RedisServer
) -> None:
    """OPS-03: a dead process's report, and one of another host, are not taken for it."""
    host = socket.gethostname()
    with closing(redis.Redis.from_url(redis_url)) as client:
        seen = f'{{"seen": {client.time()[0]}}}'
        client.hset(WORKERS, mapping={f"{host}:{2**22 + 1}": seen, "elsewhere:1": seen})
        code, said = checked({"STEPFLEET_REDIS_URL": redis_url})
        assert (code, "no worker or keeper of" in said) == (1, True)
        client.hset(KEEPERS, f"{host}:{os.getpid()}", '{"seen": 1}')
        assert checked({"STEPFLEET_REDIS_URL": redis_url})[0] == 1
        client.hset(KEEPERS, f"{host}:{os.getpid()}", seen)
        assert checked({"STEPFLEET_REDIS_URL": redis_url})[0] == 0
        assert checked({"STEPFLEET_REDIS_URL": redis_url, "STEPFLEET_PREFIX": "other:"})[0] == 1
    code, said = checked({"STEPFLEET_REDIS_URL": f"redis://127.0.0.1:{free_port()}/0"})
    assert (code, "cannot be reached" in said, "Traceback" in said) == (0, True, False)
    code, said = checked({"STEPFLEET_REDIS_URL": "nonsense"})
    assert (code, "redis_url" in said) == (1, True)
