"""The image's health check asks a worker over the broker that its settings name."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from support.deadlines import wait_until
from support.servers.redis_cluster import redis_cluster
from support.servers.redis_servers import RedisServer, free_port
from support.servers.sentinel_fleet import sentinel_fleet
from support.workers.fleet_workers import FleetWorker

Start = Callable[..., FleetWorker]
Place = Callable[[RedisServer], AbstractContextManager[dict[str, str]]]
HEALTH_CHECK = Path(__file__).resolve().parents[3] / "deploy" / "healthcheck.py"
LONG = 60.0


def checked(variables: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, HEALTH_CHECK],
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
            name=f"one@{socket.gethostname()}",
        )
        wait_until(lambda: checked(variables)[0] == 0, within=LONG, what="the worker's health")
        worker.end()


def test_settings_that_name_no_broker_are_reported() -> None:
    code, said = checked({"STEPFLEET_REDIS_URL": f"redis+cluster://127.0.0.1:{free_port()}"})
    assert code == 1
    assert "STEPFLEET_BROKER_URL" in said
    assert "Traceback" not in said
