"""Places of archives: disks that fill up, storages that refuse, hang and die, crashes between."""

import asyncio
import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from support import file_share
from support.deadlines import until
from support.loaded_modules import loaded_by
from support.servers.object_storage import KEY, SECRET, ObjectStorage, object_storage

from stepfleet.orchestrator.archive import places
from stepfleet.orchestrator.archive.places import ArchivePlace
from stepfleet.orchestrator.errors import ArchiveError, ConfigurationError

TEN = b"0123456789"


@pytest.fixture(params=["file", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/not there yet?/archive"
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/archive"
    server: ObjectStorage = request.getfixturevalue("storage")
    return server.url(f"{server.bucket(uuid.uuid4().hex)}/some/archive")


@pytest.fixture
def place(url: str) -> ArchivePlace:
    return ArchivePlace.open(url)


async def refusal(call: Awaitable[Any]) -> ArchiveError:
    with pytest.raises(ArchiveError) as caught:
        await call
    return caught.value


async def test_files_are_written_replaced_listed_and_removed(place: ArchivePlace, url: str) -> None:
    """OPS-05"""
    assert await place.names() == []
    await place.write("b.lines", b"first")
    await place.write("a.lines", TEN)
    await place.write("b.lines", b"")
    assert await place.names() == ["a.lines", "b.lines"]
    assert (await place.read("a.lines"), await place.read("b.lines")) == (TEN, b"")
    await place.remove("a.lines")
    await place.remove("a.lines")
    assert await place.names() == ["b.lines"]
    await ArchivePlace.open(url).write("c.lines", TEN)
    assert await place.names() == ["b.lines", "c.lines"]  # another process's files, too


async def test_a_part_is_read_and_a_short_one_is_an_error(place: ArchivePlace) -> None:
    """OPS-05"""
    await place.write("a", TEN)
    assert await place.read("a", 2, 3) == b"234"
    assert await place.read("a", 7) == b"789"
    assert await place.read("a", 0, 10) == TEN
    assert await place.read("a", 3, 0) == b""
    for start, length in ((8, 3), (0, 11), (40, 2)):
        error = await refusal(place.read("a", start, length))
        assert f"archive {place.url}: cannot read a: " in error.message
        assert error.is_missing


async def test_a_missing_file_is_told_from_other_trouble(place: ArchivePlace) -> None:
    """OPS-05: a local folder that is missing is other trouble: a disk that is not mounted."""
    if place.url.startswith("file:"):
        error = await refusal(place.read("gone"))
        assert (error.is_missing, "is its disk mounted?" in error.message) == (False, True)
        await place.write("other", b"x")
    for _ in range(2):
        error = await refusal(place.read("gone", 1, 2))
        assert error.message == f"archive {place.url}: cannot read gone: there is no such file"
        assert (error.is_missing, error.retryable) == (True, False)
        await place.remove("gone")
        await place.write("other", b"x")


async def test_names_are_of_files_directly_in_the_folder(place: ArchivePlace, url: str) -> None:
    below = ArchivePlace.open(url.replace("/archive", "/archive/below"))
    beside = ArchivePlace.open(url.replace("/archive", "/archive-2"))
    for one in (place, below, beside):
        await one.write(f"of-{one.url[-5:]}", TEN)
    assert await place.names() == ["of-chive"]
    assert await below.names() == ["of-below"]


@pytest.mark.parametrize("name", ["", "../a", "a/b", ".hidden", "a*", "a\n", "x" * 201])
async def test_no_name_leaves_the_folder(name: str) -> None:
    place = ArchivePlace.open("memory://names")
    calls: list[Callable[[], Awaitable[Any]]] = [
        lambda: place.write(name, TEN),
        lambda: place.read(name),
        lambda: place.remove(name),
    ]
    for call in calls:
        with pytest.raises(ArchiveError, match="is no name of a file"):
            await call()


async def test_only_the_asked_part_leaves_the_object_storage(storage: ObjectStorage) -> None:
    place = ArchivePlace.open(storage.url(f"{storage.bucket('parts')}/a"))
    await place.write("large", bytes(1 << 20))
    assert await place.read("large", 1000, 24) == bytes(24)
    answers = [
        line for line in storage.log.read_text().splitlines() if "GET /parts/a/large" in line
    ]
    assert [line.split()[-2] for line in answers] == ["206"]


# --------------------------------------------------------------------------- trouble


async def test_a_missing_bucket_is_no_missing_file(storage: ObjectStorage) -> None:
    """OPS-05: or a wrong setting would read as an empty archive."""
    place = ArchivePlace.open(storage.url("no-such-bucket/archive"))
    calls = [place.write("a", TEN), place.read("a"), place.remove("a"), place.names()]
    for call in calls:
        error = await refusal(call)
        assert "archive s3://no-such-bucket/archive: cannot " in error.message
        assert error.message.endswith("FileNotFoundError: The specified bucket does not exist")
        assert (error.is_missing, error.retryable) == (False, True)


async def test_a_refused_key_is_an_error_that_does_not_show_it(storage: ObjectStorage) -> None:
    place = ArchivePlace.open(storage.url(f"{storage.bucket('refusing')}/archive"))
    with storage.refusing():
        errors = [await refusal(call) for call in (place.write("a", TEN), place.read("a"))]
    for error in errors:
        assert "PermissionError: " in error.message
        assert not error.is_missing
        shown = "".join(traceback.format_exception(error))
        assert KEY not in shown
        assert SECRET not in shown
    await place.write("a", TEN)


async def test_credentials_in_the_address_of_a_server_are_not_shown() -> None:
    """The storage's own error quotes them."""
    address = "http://someone:password-of-tests@bad%20host"
    place = ArchivePlace.open(f"s3://bucket/archive?endpoint_url={address}&key=k&secret=s")
    error = await refusal(place.read("a"))
    assert error.message.endswith("Invalid endpoint: http://someone:[redacted]@bad host")
    assert "password-of-tests" not in "".join(traceback.format_exception(error))


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[ArchivePlace]:
    """A place whose file `a` answers nobody until somebody writes to it, like a dead NFS server."""
    os.mkfifo(tmp_path / "a")
    (tmp_path / "b").write_bytes(TEN)
    yield ArchivePlace.open(f"file://{tmp_path}")
    answer(tmp_path / "a")


def answer(fifo: Path) -> None:
    """Let all go on who wait for the file."""
    with contextlib.suppress(OSError):  # nobody waits
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))


async def test_no_answer_is_an_error_in_time_and_hung_calls_have_a_number(
    hung: ArchivePlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPS-05: those that have returned at last make room again."""
    monkeypatch.setattr(places, "LATE_CALLS", 2)
    with pytest.raises(asyncio.TimeoutError):  # a caller who gives up counts as well
        await asyncio.wait_for(hung.read("a"), 0.1)
    monkeypatch.setattr(places, "CALL_SECONDS", 0.1)
    assert (await refusal(hung.read("a"))).message.endswith("no answer within 0.1 s")
    monkeypatch.undo()
    monkeypatch.setattr(places, "LATE_CALLS", 2)
    assert "2 earlier calls have not returned" in (await refusal(hung.read("b"))).message
    late = hung._late
    await until(lambda: opened_by_both(tmp_path / "a", late), what="the end of hung calls")
    assert await hung.read("b") == TEN


async def opened_by_both(fifo: Path, late: set[Future[Any]]) -> bool:
    answer(fifo)
    return all(one.done() for one in late)


def test_a_hung_storage_does_not_keep_a_process_from_its_end(hung: ArchivePlace) -> None:
    """OPS-05"""
    ended = run_program(READ_ONCE, hung.url)
    assert ended.stdout == "no answer within 0.1 s\n", ended.stderr


async def test_a_server_that_dies_in_a_call_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPS-05"""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # of those under s3fs's own five
    with object_storage(tmp_path) as server:
        place = ArchivePlace.open(server.url(f"{server.bucket('dying')}/archive"))
        await place.write("a", TEN)
        server.process.send_signal(signal.SIGSTOP)
        calls = [asyncio.create_task(refusal(one)) for one in (place.read("a"), place.names())]
        assert await asyncio.wait(calls, timeout=0.2) == (set(), set(calls))
        server.process.kill()
        for error in await asyncio.gather(*calls):
            assert server.address in error.message
            assert "no answer within" not in error.message


@pytest.mark.parametrize("protocol", ["file", "s3"])
def test_a_place_that_was_used_before_a_fork_works_in_the_child(
    protocol: str, tmp_path: Path, storage: ObjectStorage
) -> None:
    """fsspec's own objects refuse to."""
    s3 = storage.url(f"{storage.bucket('forked')}/archive")
    done = run_program(FORKS, s3 if protocol == "s3" else f"file://{tmp_path}/archive")
    assert done.stdout == "written before\n", done.stderr


def test_places_of_one_url_share_nothing(url: str) -> None:
    """Such as credentials that have been replaced since."""
    assert ArchivePlace.open(url)._opened() is not ArchivePlace.open(url)._opened()


def test_one_place_serves_several_event_loops(storage: ObjectStorage) -> None:
    place = ArchivePlace.open(storage.url(f"{storage.bucket('loops')}/archive"))
    asyncio.run(place.write("a", TEN))
    assert asyncio.run(place.read("a")) == TEN


READ_ONCE = """
import asyncio, sys
from stepfleet.orchestrator.archive import places
from stepfleet.orchestrator.errors import ArchiveError
places.CALL_SECONDS = 0.1
try:
    asyncio.run(places.ArchivePlace.open(sys.argv[1]).read("a"))
except ArchiveError as error:
    print(error.message.partition("cannot read a: ")[2])
"""
FORKS = """
import asyncio, os, sys
from stepfleet.orchestrator.archive.places import ArchivePlace
place = ArchivePlace.open(sys.argv[1])
asyncio.run(place.write("a", b"written before"))
if os.fork() == 0:
    print(asyncio.run(place.read("a")).decode(), flush=True)
else:
    os.wait()
"""


def run_program(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    command = [sys.executable, "-c", program, *arguments]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)


# ----------------------------------------------------------------------- local disks


async def test_folders_and_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    """OPS-05: they hold conversations."""
    (tmp_path / "there").mkdir(0o755)
    place = ArchivePlace.open(f"file://{tmp_path}/there/a/b")
    before = os.umask(0)
    try:
        await place.write("x", TEN)
    finally:
        os.umask(before)
    paths = [tmp_path / "there" / part for part in ("a", "a/b", "a/b/x")]
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o700, 0o700, 0o600]
    assert stat.S_IMODE((tmp_path / "there").stat().st_mode) == 0o755


async def test_what_is_written_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPS-05: and then the name, and the folder's own."""
    folder, synced, real = tmp_path / "new", [], os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        folders = {one.stat().st_ino: one.name for one in (tmp_path, folder)}
        name = folders.get(os.fstat(descriptor).st_ino, "a file")
        synced.append((name, os.fstat(descriptor).st_size if name == "a file" else None))
        synced.append(("named", (folder / "x").exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    await ArchivePlace.open(f"file://{folder}").write("x", TEN)
    parts = [(tmp_path.name, None), ("a file", len(TEN)), ("new", None)]
    assert synced[::2] == parts
    assert synced[1::2] == [("named", False), ("named", False), ("named", True)]


CRASHES = """
import asyncio, os, resource, signal, sys
from support import file_share
from support.deadlines import until
from stepfleet.orchestrator.archive.places import ArchivePlace
file_share.register()
place = ArchivePlace.open(sys.argv[1])
asyncio.run(place.write("old", b"as it was"))
if sys.argv[2] == "in the middle":
    # What is written beyond the limit kills the process, as the default of the signal is.
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
else:
    os.fsync = os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(place.write(sys.argv[3], bytes(9000)))
"""


@pytest.mark.parametrize("name", ["new", "old"])
@pytest.mark.parametrize("where", ["in the middle", "before the end"])
@pytest.mark.parametrize("protocol", ["file", "share"])
async def test_a_crash_in_a_write_leaves_no_file_under_its_name(
    protocol: str, where: str, name: str, tmp_path: Path
) -> None:
    """OPS-05: what it leaves is removed an hour later."""
    file_share.register()
    place = ArchivePlace.open(f"{protocol}://{tmp_path}")
    killed = run_program(CRASHES, place.url, where, name)
    assert killed.returncode in (-signal.SIGXFSZ, -signal.SIGKILL), killed.stderr
    (left,) = tmp_path.glob(".*.part")
    assert left.stat().st_size == (4096 if where == "in the middle" else 9000)
    assert await place.names() == ["old"]
    assert await place.read("old") == b"as it was"
    os.utime(left, (time.time() - 3500,) * 2)
    await place.names()
    assert left.exists()
    os.utime(left, (time.time() - 3700,) * 2)
    await ArchivePlace.open(place.url).write("next", TEN)
    assert not left.exists()
    assert await place.names() == ["next", "old"]


FULL = """
import asyncio, resource, signal, sys
from stepfleet.orchestrator.archive.places import ArchivePlace
from stepfleet.orchestrator.errors import ArchiveError
if sys.argv[2] == "limit":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
async def main():
    place = ArchivePlace.open(f"file://{sys.argv[1]}")
    await place.write("a", b"as it was")
    try:
        await place.write("a", bytes(2 << 20))
    except ArchiveError as error:
        print(error.message, error.is_missing)
    print(await place.read("a"), *__import__("os").listdir(sys.argv[1]))
asyncio.run(main())
"""


def test_a_full_disk_is_an_error_and_the_file_stays_as_it_was(tmp_path: Path) -> None:
    """OPS-05: a disk of 1 MB, where the machine lets us mount one; else a limit of its size."""
    mount = f"mount -t tmpfs -o size=1m tmpfs {tmp_path}"
    unshared = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    probe = subprocess.run([*unshared, mount], capture_output=True, check=False)
    program = [sys.executable, "-c", FULL, str(tmp_path)]
    if probe.returncode == 0:
        command = [*unshared, f'{mount} && exec "$@"', "sh", *program, "disk"]
        why = "[Errno 28] No space left on device"
    else:
        command, why = [*program, "limit"], "[Errno 27] File too large"
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == [
        f"archive file://{tmp_path}: cannot write a: OSError: {why} False",
        "b'as it was' a",
    ], done.stderr


async def test_a_file_where_the_folder_should_be_and_a_folder_where_the_file(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_bytes(TEN)
    (tmp_path / "folder").mkdir()
    place = ArchivePlace.open(f"file://{tmp_path}/file")
    assert "NotADirectoryError" in (await refusal(place.write("a", TEN))).message
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    place = ArchivePlace.open(f"file://{tmp_path}/link/below")
    error = await refusal(place.write("a", TEN))
    assert "cannot write a: FileNotFoundError: " in error.message
    assert not error.is_missing
    place = ArchivePlace.open(f"file://{tmp_path}")
    for call in (place.write("folder", TEN), place.read("folder"), place.remove("folder")):
        assert not (await refusal(call)).is_missing
    assert await place.names() == ["file"]


# ------------------------------------------------------------------------------ URLs


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "names no protocol"),
        ("archive", "names no protocol"),
        ("/var/lib/archive", "names no protocol: write file:///var/lib/stepfleet/archive"),
        ("://bucket", "names no protocol"),
        ("file://", "is a relative path"),
        ("file://archive", r"is a relative path: .* file:///var/lib/stepfleet/archive"),
        ("file:///", "names no path"),
        ("s3://", "names no path"),
        ("s3://?endpoint_url=http://minio:9000", "names no path"),
        ("memory://", "names no path"),
        ("s3://key:secret-word@bucket/a", "credentials where .* AWS_SECRET_ACCESS_KEY"),
        ("s4://bucket/a", "fsspec knows no protocol 's4': write .*s3://bucket/prefix"),
        ("gs://bucket/a", "gs:// needs a package that is not installed: pip install gcsfs"),
        ("abfs://box@account/a", "pip install adlfs"),
        ("sftp://user:secret-word@host/a", "paramiko"),
    ],
)
def test_a_wrong_url_names_the_setting_and_the_fix(url: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^archive_url.*{why}") as caught:
        ArchivePlace.open(url)
    assert "secret-word" not in "".join(traceback.format_exception(caught.value))


def test_without_fsspec_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.registry", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'stepfleet\[archive\]'"):
        ArchivePlace.open("memory://x")


def test_nobody_loads_fsspec_who_opens_no_archive() -> None:
    assert "fsspec" not in loaded_by("import stepfleet.orchestrator.archive.places")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("file:///var/lib/archive/", "file:///var/lib/archive"),
        ("s3://bucket/a/b?key=k&secret=s", "s3://bucket/a/b"),
        ("http://user:word@host:80/a?token=t", "http://host:80/a"),
        ("memory://a@b/c", None),
    ],
)
def test_a_url_is_shown_without_credentials_and_options(url: str, shown: str | None) -> None:
    if shown is None:
        with pytest.raises(ConfigurationError, match="has credentials"):
            ArchivePlace.open(url)
    else:
        assert ArchivePlace.open(url).url == shown
