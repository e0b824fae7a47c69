"""A data folder that came from somewhere else runs nothing and leads nowhere."""

import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import redis
from support.workers.command_line import CommandLine

from stepfleet.orchestrator.store.embedded import EmbeddedRedis, EmbeddedRedisError
from stepfleet.orchestrator.store.embedded.folder import Folder

PASSWORD = "a-password-of-32-plain-characters"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / ".stepfleet"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[CommandLine]:
    made = CommandLine(tmp_path)
    yield made
    made.end()


def address(folder: Path, **fields: object) -> None:
    whole = {"port": 23_456, "password": PASSWORD, **fields}
    (folder / "address.json").write_text(json.dumps(whole))


def data(folder: Path, *commands: tuple[str, ...]) -> None:
    """Write an append-only file with these commands."""
    parts = folder / "appendonlydir"
    parts.mkdir(mode=0o700)
    name = "appendonly.aof.1.incr.aof"
    (parts / "appendonly.aof.manifest").write_text(f"file {name} seq 1 type i\n")
    text = "".join(
        f"*{len(command)}\r\n" + "".join(f"${len(word)}\r\n{word}\r\n" for word in command)
        for command in commands
    )
    (parts / name).write_text(text, newline="")


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A program that shows whether it was run, by a file beside it."""
    script = tmp_path / "redis-server"
    script.write_text(
        f"#!/bin/sh\ntouch {tmp_path / 'was-run'}\necho 'Redis server v=99.0.0 sha=0'\n"
    )
    script.chmod(0o755)
    return script


@pytest.mark.parametrize("field", ["binary", "server"])
def test_a_program_that_the_folder_names_is_not_run(
    commands: CommandLine, folder: Path, trap: Path, field: str
) -> None:
    data(folder, ("SELECT", "0"), ("SET", "kept", "yes"))
    address(folder, **{field: str(trap)})
    done = commands("status")
    assert done.returncode == 0, done.stderr
    with (
        EmbeddedRedis.start(folder) as server,
        closing(redis.Redis.from_url(server.url)) as client,
    ):
        assert client.get("kept") == b"yes"
    assert not (folder.parent / "was-run").exists()


@pytest.mark.parametrize(
    "fields",
    [
        {"password": "x@198.51.100.1:6379/0?a="},
        {"password": ""},
        {"password": 5},
        {"port": "1@198.51.100.1:6379"},
        {"port": 0},
        {"port": 65_536},
        {"port": True},
        {"server": ["redis"]},
        {"binary": 5},
    ],
)
def test_an_address_that_leads_elsewhere_is_refused(
    folder: Path, fields: dict[str, object]
) -> None:
    address(folder, **fields)
    with pytest.raises(EmbeddedRedisError, match=r"address\.json is damaged. Fix: delete"):
        Folder(folder).read_address()


@pytest.mark.parametrize(
    "command",
    [("MODULE", "LOAD", "/there-is-no-such.so"), ("REPLICAOF", "198.51.100.1", "6379")],
)
@pytest.mark.parametrize("program", ["redis", "valkey"])
def test_data_that_load_a_program_or_follow_another_server_are_not_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], program: str
) -> None:
    if program == "valkey":
        monkeypatch.setenv("PATH", str(folder / "empty"))
    data(folder, ("SELECT", "0"), command)
    with pytest.raises(EmbeddedRedisError, match=rf"(?i)unknown command '{command[0]}'"):
        EmbeddedRedis.start(folder)


def test_a_folder_of_another_user_is_refused_with_the_fix(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address(folder)
    owner = folder.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    for use in (EmbeddedRedis.start, Folder.prepare, lambda path: Folder(path).read_address()):
        with pytest.raises(EmbeddedRedisError, match=rf"belongs to user {owner}.*chown -R"):
            use(folder)


def test_a_folder_that_others_can_write_is_refused_by_commands(
    commands: CommandLine, folder: Path
) -> None:
    data(folder, ("SELECT", "0"))
    folder.chmod(0o770)
    for command in (("status",), ("doctor",), ("worker", "--agents", "agents.py")):
        done = commands(*command)
        assert done.returncode == 2
        told = " ".join((done.stdout + done.stderr).split())
        assert "can be written by other users" in told
        assert "chmod -R go-w" in told
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["address.json", "appendonlydir", "appendonlydir/part", "logs"])
def test_an_entry_that_others_can_reach_and_write_is_refused(folder: Path, name: str) -> None:
    path = folder / name
    if "." in name or "/" in name:
        path.parent.mkdir(exist_ok=True)
        path.touch()
        path.chmod(0o666)
    else:
        path.mkdir()
        path.chmod(0o777)
    Folder.prepare(folder)  # only its owner can enter the folder
    folder.chmod(0o755)
    with pytest.raises(EmbeddedRedisError, match=f"{name} can be written by other users"):
        Folder.prepare(folder)


@pytest.mark.parametrize("name", ["redis.log", "logs", "appendonlydir", "logs/worker-1.log"])
def test_a_link_in_the_folder_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EmbeddedRedisError, match=f"{name} is a link"):
        EmbeddedRedis.start(folder)
    assert not (tmp_path / "elsewhere").exists()


def test_the_folder_itself_may_be_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    with EmbeddedRedis.start(tmp_path / "link"):
        assert (folder / "redis.conf").exists()
