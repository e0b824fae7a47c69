"""The deployment's Redis really starts, keeps strangers out and carries a worker."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import redis
from support.deadlines import wait_until
from support.servers.redis_servers import free_port
from support.workers.keeper_process import KeeperProcess

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
PASSWORD = "a password with spaces"


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    chosen = free_port()
    folder = tmp_path_factory.mktemp("deployed")
    server = subprocess.Popen(
        [DEPLOY / "redis-start.sh", f"dir {folder}", f"port {chosen}", "bind 127.0.0.1"],
        env={**os.environ, "REDIS_PASSWORD": PASSWORD, "TMPDIR": str(folder)},
        stdout=subprocess.DEVNULL,
    )

    def listens() -> bool:
        assert server.poll() is None, "redis-server ended at its start"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", chosen)) == 0

    wait_until(listens, within=60, what="the server")
    yield chosen
    server.terminate()
    server.wait(timeout=60)


@pytest.fixture
def url(port: int) -> str:
    return f"redis://stepfleet:{PASSWORD.replace(' ', '%20')}@127.0.0.1:{port}/0"


@pytest.fixture
def client(url: str) -> Iterator[redis.Redis]:
    with closing(redis.Redis.from_url(url)) as connected:
        yield connected


def test_the_server_is_durable_and_evicts_nothing(client: redis.Redis) -> None:
    assert client.config_get("appendonly", "maxmemory-policy", "stream-node-max-bytes") == {
        "appendonly": "yes",
        "maxmemory-policy": "noeviction",
        "stream-node-max-bytes": "1024",
    }


def test_nobody_gets_in_without_the_password(port: int) -> None:
    with (
        closing(redis.Redis.from_url(f"redis://127.0.0.1:{port}")) as stranger,
        pytest.raises(redis.AuthenticationError),
    ):
        stranger.ping()


@pytest.mark.parametrize("command", ["FLUSHALL", "SHUTDOWN", "KEYS *", "CONFIG SET maxmemory 1"])
def test_the_fleets_user_may_not_do_what_ruins_a_server(client: redis.Redis, command: str) -> None:
    with pytest.raises(redis.exceptions.NoPermissionError):
        client.execute_command(*command.split())  # type: ignore[no-untyped-call]


def test_the_fleets_user_may_run_scripts_streams_and_reads_of_the_set_up(
    client: redis.Redis,
) -> None:
    script = client.register_script("return redis.call('INCR', KEYS[1])")
    assert script(keys=["sf:counter"]) == 1
    assert client.xadd("sf:events", {"kind": "step"})
    assert client.info("persistence")["aof_enabled"] == 1


def check_health(url: str) -> int:
    return subprocess.run(
        [sys.executable, "-m", "stepfleet.orchestrator.cli", "doctor", "--live"],
        env={**os.environ, "STEPFLEET_REDIS_URL": url},
        check=False,
    ).returncode


def test_the_fleets_user_may_keep_the_fleet_and_probe_it(url: str, tmp_path: Path) -> None:
    """OPS-03: the health check of the image passes while this host's keeper reports."""
    assert check_health(url) == 1
    keeper = KeeperProcess(tmp_path, url).start()
    try:
        assert check_health(url) == 0
        assert "NOPERM" not in keeper.log
    finally:
        keeper.end()
