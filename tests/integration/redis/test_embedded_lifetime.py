"""A private server lives as long as somebody uses it, and keeps what it was told."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import cached_property
from pathlib import Path

import psutil
import pytest
import redis
from support.deadlines import wait_until
from support.workers.ended import until_ended

from stepfleet.orchestrator.store.embedded import EmbeddedRedis, EmbeddedRedisError

USER = """
import sys
from stepfleet.orchestrator.store.embedded import EmbeddedRedis
server = EmbeddedRedis.start(sys.argv[1])
print(server.url, flush=True)
sys.stdin.read()
server.stop()
"""


class User:
    """Another process that uses the folder's server until its standard input ends."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", USER, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @cached_property
    def url(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self, how: signal.Signals | None = None) -> None:
        if how is not None:
            self.process.send_signal(how)
        self.process.communicate(timeout=60)


@pytest.fixture
def users(tmp_path: Path) -> Iterator[list[User]]:
    started: list[User] = []
    yield started
    for user in started:
        user.end(signal.SIGKILL)


def answers(url: str) -> bool:
    with closing(redis.Redis.from_url(url, retry=None)) as client:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False


def pid_of(url: str) -> int:
    with closing(redis.Redis.from_url(url)) as client:
        return int(client.info("server")["process_id"])


def test_data_outlives_a_stop_and_the_address_stays(tmp_path: Path) -> None:
    with EmbeddedRedis.start(tmp_path) as first, closing(redis.Redis.from_url(first.url)) as client:
        client.set("kept", "yes")
    assert not answers(first.url)
    with EmbeddedRedis.start(tmp_path) as again, closing(redis.Redis.from_url(again.url)) as client:
        assert client.get("kept") == b"yes"
        assert again.url == first.url


def test_data_outlives_a_killed_server(tmp_path: Path) -> None:
    with EmbeddedRedis.start(tmp_path) as killed:
        with closing(redis.Redis.from_url(killed.url)) as client:
            client.set("kept", "yes")
        os.kill(pid_of(killed.url), signal.SIGKILL)
        wait_until(lambda: not answers(killed.url), within=60, what="the server's end")
        with EmbeddedRedis.start(tmp_path) as again:
            assert again.url == killed.url
            with closing(redis.Redis.from_url(again.url)) as client:
                assert client.get("kept") == b"yes"


def test_a_cut_tail_of_the_file_is_left_out_and_the_rest_loaded(tmp_path: Path) -> None:
    with (
        EmbeddedRedis.start(tmp_path) as server,
        closing(redis.Redis.from_url(server.url)) as client,
    ):
        client.set("whole", "1")
        client.set("cut", "2")
    tail = next((tmp_path / "appendonlydir").glob("*.incr.aof"))
    os.truncate(tail, tail.stat().st_size - 3)
    with (
        EmbeddedRedis.start(tmp_path) as server,
        closing(redis.Redis.from_url(server.url)) as client,
    ):
        assert client.get("whole") == b"1"
        assert client.get("cut") is None


def test_the_server_is_durable_and_evicts_nothing(tmp_path: Path) -> None:
    expected = {
        "appendonly": "yes",
        "appendfsync": "everysec",
        "maxmemory-policy": "noeviction",
        "stream-node-max-bytes": "1024",
        "aof-load-truncated": "yes",
        "bind": "127.0.0.1",
    }
    with (
        EmbeddedRedis.start(tmp_path) as server,
        closing(redis.Redis.from_url(server.url)) as client,
    ):
        assert client.config_get(*expected) == expected


def test_a_client_without_the_password_is_refused(tmp_path: Path) -> None:
    with EmbeddedRedis.start(tmp_path) as server:
        port = server.url.rpartition(":")[2]
        with (
            closing(redis.Redis.from_url(f"redis://127.0.0.1:{port}")) as stranger,
            pytest.raises(redis.AuthenticationError),
        ):
            stranger.ping()


def test_the_password_stands_in_no_command_line_and_in_no_open_file(tmp_path: Path) -> None:
    with EmbeddedRedis.start(tmp_path) as server:
        password = server.url.split(":")[2].partition("@")[0]
        process = psutil.Process(pid_of(server.url))
        for seen in (process.cmdline(), *(parent.cmdline() for parent in process.parents()[:1])):
            assert not any(password in word for word in seen)
        holders = [p for p in tmp_path.iterdir() if p.is_file() and password in p.read_text()]
        assert {path.name for path in holders} == {"address.json", "redis.conf"}
        assert all(path.stat().st_mode & 0o077 == 0 for path in holders)


def test_two_owners_in_one_process_share_the_server(tmp_path: Path) -> None:
    with EmbeddedRedis.start(tmp_path) as first:
        with EmbeddedRedis.start(tmp_path) as second:
            assert pid_of(second.url) == pid_of(first.url)
        assert answers(first.url)
    assert not answers(first.url)


def test_the_server_outlives_its_starter_while_another_user_remains(
    tmp_path: Path, users: list[User]
) -> None:
    users.append(User(tmp_path))
    first = users[0].url
    with EmbeddedRedis.start(tmp_path) as joined:
        assert joined.url == first
        users[0].end()
        assert answers(joined.url)
    assert not answers(joined.url)


def test_processes_that_start_at_the_same_moment_share_one_server(
    tmp_path: Path, users: list[User]
) -> None:
    users.extend(User(tmp_path) for _ in range(4))
    assert len({user.url for user in users}) == 1
    assert len({pid_of(user.url) for user in users}) == 1


def test_killing_the_only_user_ends_server_and_guardian(tmp_path: Path, users: list[User]) -> None:
    users.append(User(tmp_path))
    server = psutil.Process(pid_of(users[0].url))
    guardian = server.parent()
    assert guardian is not None
    users[0].end(signal.SIGKILL)
    wait_until(lambda: not server.is_running(), within=60, what="the server's end")
    wait_until(lambda: not guardian.is_running(), within=60, what="the guardian's end")


def test_a_folder_whose_guardian_was_killed_starts_anew(tmp_path: Path) -> None:
    with EmbeddedRedis.start(tmp_path) as orphaned:
        with closing(redis.Redis.from_url(orphaned.url)) as client:
            client.set("kept", "yes")
        guardian = psutil.Process(pid_of(orphaned.url)).parent()
        assert guardian is not None
        guardian.kill()
        until_ended(guardian)
        with (
            EmbeddedRedis.start(tmp_path) as again,
            closing(redis.Redis.from_url(again.url)) as client,
        ):
            assert client.get("kept") == b"yes"
    assert not answers(again.url)


def test_stopping_twice_is_harmless(tmp_path: Path) -> None:
    server = EmbeddedRedis.start(tmp_path)
    server.stop()
    server.stop()
    assert not answers(server.url)


def test_a_server_that_was_told_another_port_is_not_joined(tmp_path: Path) -> None:
    with EmbeddedRedis.start(tmp_path) as running:
        with pytest.raises(EmbeddedRedisError, match="already listens on port"):
            EmbeddedRedis.start(tmp_path, port=20_001)
        assert answers(running.url)
