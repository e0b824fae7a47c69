"""Archives out of reach or damaged, and a full Redis: nothing is lost, errors name the file."""

import asyncio
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.runs.archives import (
    archive,
    check_files,
    ended,
    ended_batch,
    files,
    in_redis,
    is_known,
    listed,
    move,
    seen,
)
from support.runs.stored_runs import Bench
from support.servers.object_storage import ObjectStorage
from support.servers.redis_servers import RedisServer

from stepfleet.orchestrator import AsyncFleet
from stepfleet.orchestrator.archive.segments import SUFFIX, build
from stepfleet.orchestrator.errors import ArchiveError, SerializationError
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store.archived import ArchiveFile


async def test_a_storage_out_of_reach_loses_nothing_and_all_goes_on_after_it(
    redis_url: str, storage: ObjectStorage, caplog: pytest.LogCaptureFixture
) -> None:
    """OPS-05: S3 over HTTP that refuses; what is live is listed, and nothing else is left out."""
    url = storage.url(f"{storage.bucket(uuid.uuid4().hex)}/runs")
    async with archive(redis_url, url, archive_after=0) as (desk, fleet):
        batch = await ended_batch(desk, fleet, 3)
        there = await ended(desk)
        assert (await move(desk)).runs == 4
        before = [await seen(fleet, one) for one in (there, *batch.run_ids())]
        waiting = await ended_batch(desk, fleet, 2)
        newest = set(waiting.run_ids())
        live = [one for one in await listed(fleet) if one in newest]
        with storage.refusing():
            async with AsyncFleet(settings=desk.opened.settings) as other:  # nothing read before
                await check_out_of_reach(desk, other, batch.id, there, live)
        assert (await desk.opened.archiving.figures()).failing_since
        assert "left out of a list" in caplog.text
        assert (await desk.opened.archiving.look()).runs == 2
        figures = await desk.opened.archiving.figures()
        assert (figures.error, figures.runs, figures.due_batches) == (None, 6, 0)
        assert [await seen(fleet, one) for one in (there, *batch.run_ids())] == before
        assert set(await listed(fleet)) == {*live, there, *batch.run_ids()}


async def check_out_of_reach(
    desk: Bench, fleet: AsyncFleet, batch_id: str, there: str, live: list[str]
) -> None:
    """Assert what an archive that refuses leaves: errors that name it, and all that is live."""
    with pytest.raises(ArchiveError, match="/runs"):
        await desk.opened.archiving.look()
    assert await in_redis(desk, live) == live
    for read in (fleet.runs.show, fleet.runs.timeline, fleet.runs.tree):
        with pytest.raises(ArchiveError, match=SUFFIX):
            await read(there)
    found = await fleet.batches.get(batch_id)
    assert (await found.progress()).completed == 3
    for ordered in (False, True):
        with pytest.raises(ArchiveError, match=SUFFIX):
            [one async for one in found.results(ordered=ordered)]
    assert await listed(fleet) == live
    with pytest.raises(ArchiveError):
        await desk.opened.returning.restore([there])


async def test_a_folder_that_refuses_loses_nothing(redis_url: str, tmp_path: Path) -> None:
    """OPS-05: whatever keeps a file from being written (see `test_places`), runs stay in Redis."""
    (tmp_path / "archive").write_text("in the way")
    async with archive(redis_url, tmp_path / "archive") as (desk, fleet):
        run_id = await ended(desk)
        with pytest.raises(ArchiveError, match="cannot write"):
            await move(desk)
        assert await in_redis(desk, [run_id]) == [run_id]
        (tmp_path / "archive").unlink()
        assert (await move(desk)).runs == 1
        assert (await fleet.runs.result(run_id)).success


@pytest.mark.parametrize("harm", ["frame", "index", "cut", "foreign", "gone", "mixed up"])
async def test_a_damaged_file_is_named_and_others_are_read(
    harm: str, redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """OPS-05: lists show what can be read, results come of the other files, the rest is named."""
    async with archive(redis_url, tmp_path) as (desk, fleet):
        batch = await ended_batch(desk, fleet, 6)
        ids = list(batch.run_ids())
        for some in (ids[:3], ids[3:]):
            assert await desk.opened.archiving.take("")
            await desk.opened.archiving._move(some, batch.id)
            await desk.opened.archiving.release("")
        await desk.opened.connection.execute(
            "HSET", desk.opened.keys.manifest(batch.id), "archived", "1"
        )
        bad = min(await files(desk), key=lambda one: one.number)
        live = await ended(desk)
        good = [one for one in await listed(fleet) if one not in ids[:3]]
        if harm == "mixed up":  # another fleet's file is under its name, say
            bad = await mixed_up(desk, bad)
        else:
            damage(tmp_path / bad.name, harm, bad.index_at)
        async with AsyncFleet(settings=load_settings(redis_url=redis_url)) as other:
            why = "no such file" if harm == "gone" else "damaged|another file|expected"
            for one in ids[:3]:
                with pytest.raises((SerializationError, ArchiveError), match=why) as caught:
                    await other.runs.show(one)
                assert bad.name in str(caught.value)
                assert str(tmp_path) in str(caught.value)
            found = await other.batches.get(batch.id)
            for ordered in (True, False):
                caplog.clear()
                results = [one.run_id async for one in found.results(ordered=ordered)]
                assert results == ids[3:]
                assert bad.name in caplog.text
                assert all(one in caplog.text for one in ids[:3])
            assert await listed(other) == good
            assert await listed(other, batch=batch.id) == ids[:2:-1]
            assert await listed(other, status="failed") == []
            with pytest.raises((SerializationError, ArchiveError), match=bad.name):
                await desk.opened.returning.restore(ids[:1])
        assert (await move(desk)).runs == 1  # others go on
        assert (await fleet.runs.result(live)).success


async def mixed_up(desk: Bench, bad: ArchiveFile) -> ArchiveFile:
    """Have Redis take another good file for this one, and return what it says."""
    other = max(await files(desk), key=lambda one: one.number)
    mixed = other.model_copy(update={"number": bad.number})
    await desk.opened.connection.execute("HSET", "sf:{archive}:files", bad.number, mixed.to_json())
    desk.opened.reads.archived.forget(bad.number)
    return mixed


def damage(path: Path, harm: str, index_at: int) -> None:
    """Harm a file of the archive."""
    data = bytearray(path.read_bytes())
    match harm:
        case "frame" | "index":
            data[(0 if harm == "frame" else index_at) + 40] ^= 4
        case "cut":
            del data[len(data) // 2 :]
        case "foreign":
            data = bytearray(build([], {}).data.ljust(len(data), b"\0"))
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(data)


async def test_no_flipped_bit_is_taken_for_a_run(redis_url: str, tmp_path: Path) -> None:
    """OPS-05: each is found, or changes nothing of what is read."""
    async with archive(redis_url, tmp_path) as (desk, fleet):
        run_id = await ended(desk)
        await move(desk)
        (file,) = await files(desk)
        whole, path = await fleet.runs.show(run_id), tmp_path / file.name
        good = path.read_bytes()
        found = 0
        for place in [*range(20), *range(20, len(good), len(good) // 40)]:
            data = bytearray(good)
            data[place] ^= 1 << place % 8
            path.write_bytes(data)
            async with AsyncFleet(settings=load_settings(redis_url=redis_url)) as other:
                try:
                    assert await other.runs.show(run_id) == whole
                except SerializationError as error:
                    assert file.name in str(error)  # noqa: PT017 - either may be
                    found += 1
        assert found > 40


def emptied(_: bytes) -> bytes:
    """Return a good file without runs."""
    return build([], {}).data


async def test_a_file_that_reads_otherwise_than_written_removes_nothing(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPS-05: nothing is deleted that was not verified: a disk that loses what it was given."""
    async with archive(redis_url, tmp_path) as (desk, fleet):
        run_id, other = await ended(desk), await ended(desk)
        place = desk.opened.reads.archived.place()
        write, harms = place.write, (lambda data: data[:-1], lambda data: data[:-100], emptied)
        for harm in harms:

            async def careless(name: str, data: bytes, harm: Any = harm) -> None:
                await write(name, harm(data) if name.endswith(SUFFIX) else data)

            with monkeypatch.context() as patch:
                patch.setattr(place, "write", careless)
                with pytest.raises(ArchiveError, match="was written"):
                    await move(desk)
            assert set(await in_redis(desk, [run_id, other])) == {run_id, other}
        assert (await move(desk)).runs == 2
        assert (await fleet.runs.result(run_id)).success


async def test_a_full_redis_is_emptied_by_archiving(
    own_redis: Callable[..., RedisServer], tmp_path: Path
) -> None:
    """OPS-05: where Redis refuses what needs memory, ended runs go all the same."""
    async with archive(own_redis().url, tmp_path) as (desk, fleet):
        batch = await ended_batch(desk, fleet, 4)
        single = await ended(desk)
        ids = [single, *batch.run_ids()]
        before = [await seen(fleet, one) for one in ids]
        await desk.opened.connection.execute("CONFIG", "SET", "maxmemory", 1)
        desk.opened.connection.patience = 2.0
        assert (await asyncio.wait_for(move(desk), 30)).runs == 5
        assert await in_redis(desk, ids) == []
        assert [await seen(fleet, one) for one in ids] == before
        await desk.opened.connection.execute("CONFIG", "SET", "maxmemory", 0)
        await check_files(desk)
        assert await is_known(fleet, single)
