"""What happens to archives while nobody looks: disks, folders, older data of Redis, processes."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.runs.archives import (
    archive,
    check_files,
    end,
    ended,
    ended_batch,
    files,
    in_redis,
    move,
)
from zstandard import ZstdCompressor

from stepfleet.orchestrator.archive.segments import ArchivedEntry, SegmentIndex, read_index
from stepfleet.orchestrator.errors import ArchiveError, ConfigurationError, SerializationError
from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store.archived import ArchivedRuns
from stepfleet.orchestrator.store.batches.batches import run_id_of
from stepfleet.orchestrator.store.pace import SweepPace
from stepfleet.orchestrator.store.runs import archiving
from stepfleet.orchestrator.store.store import open_store

STATE, FILES = "sf:{archive}:state", "sf:{archive}:files"


async def test_a_disk_that_is_not_mounted_gets_no_runs(redis_url: str, tmp_path: Path) -> None:
    """OPS-05: a folder that is gone, or another one in its place, is no archive."""
    folder = tmp_path / "disk" / "archive"
    async with archive(redis_url, folder, archive_after=0) as (desk, fleet):
        first = await ended(desk)
        await move(desk)
        second = await ended(desk)
        folder.rename(tmp_path / "away")
        for told in ("the folder is not there", "lacks this fleet's stepfleet-archive.json"):
            with pytest.raises(ArchiveError, match=told):
                await move(desk)
            assert await in_redis(desk, [second]) == [second]
            folder.mkdir(exist_ok=True)
        folder.rmdir()
        (tmp_path / "away").rename(folder)
        assert (await move(desk)).runs == 1
        assert [(await fleet.runs.result(one)).success for one in (first, second)] == [True, True]
        await check_files(desk)


async def test_a_folder_of_another_fleet_is_refused(redis_url: str, tmp_path: Path) -> None:
    async with archive(redis_url, tmp_path) as (desk, _):
        await ended(desk)
        await move(desk)
        await desk.opened.connection.execute("HDEL", STATE, f"place:file://{tmp_path}")
        run_id = await ended(desk)
        with pytest.raises(
            ArchiveError, match="another fleet's: give this one a folder of its own"
        ):
            await move(desk)
        assert await in_redis(desk, [run_id]) == [run_id]


async def test_a_place_whose_mark_was_not_written_is_marked_by_the_next_process(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with archive(redis_url, tmp_path) as (desk, _):
        await ended(desk)
        place = desk.opened.reads.archived.place()

        async def dies(*_: Any) -> None:
            raise ArchiveError("gone")

        with monkeypatch.context() as patch:
            patch.setattr(place, "write", dies)
            with pytest.raises(ArchiveError, match="gone"):
                await move(desk)
        assert (await move(desk)).runs == 1
        await check_files(desk)


async def test_files_after_a_loss_of_redis_newest_writes_have_numbers_of_their_own(
    redis_url: str, tmp_path: Path
) -> None:
    """A client that lives on through a failover reads the new files, and not what it keeps."""
    async with archive(redis_url, tmp_path) as (desk, fleet):
        first = await ended_batch(desk, fleet, 2)
        await move(desk)
        assert [one.output async for one in first.results()] == ["answer 0", "answer 1"]
        [known] = await files(desk)
        await desk.opened.connection.execute("HSET", STATE, "files", 0)
        second = await ended_batch(desk, fleet, 3, failing=[2])
        await move(desk)
        assert known.number not in {one.number for one in await files(desk)} - {known.number}
        assert len(await files(desk)) == 2
        assert len([one async for one in second.results()]) == 3
        assert len([one async for one in first.results()]) == 2


@pytest.mark.parametrize("url", ["memory://archive", "simplecache::s3://bucket/a", "filecache://x"])
def test_a_place_that_does_not_last_is_refused(url: str) -> None:
    settings: Any = load_settings(redis_url="redis://localhost:1/0", archive_url=url)
    nobody: Any = None
    names: Any = type("Names", (), {"of": staticmethod(str)})
    with pytest.raises(ConfigurationError, match=r"archive_url begins with .*where they last"):
        ArchivedRuns(settings, nobody, names, nobody).place()


async def test_an_entry_with_a_strange_name_is_damage_of_its_runs_only(
    redis_url: str, tmp_path: Path
) -> None:
    """OPS-05: nothing outside the folder is read, and the other files are verified."""
    async with archive(redis_url, tmp_path) as (desk, fleet):
        run_id = await ended(desk)
        await move(desk)
        other = await ended(desk)
        await move(desk)
        bad, good = sorted(await files(desk), key=lambda one: one.number)
        entry = bad.model_copy(update={"name": "../../etc/passwd"}).to_json()
        await desk.opened.connection.execute("HSET", FILES, bad.number, entry)
        with pytest.raises(ArchiveError, match="is no name of a file of an archive"):
            await fleet.runs.show(run_id)
        assert (await fleet.runs.result(other)).success
        found = await fleet.archive.verify()
        assert [one.run_ids for one in found.damaged] == [(run_id,)]
        assert found.runs == good.runs == 1


async def test_a_damaged_file_of_one_batch_hides_no_line_of_another(
    redis_url: str, tmp_path: Path
) -> None:
    async with archive(redis_url, tmp_path) as (desk, fleet):
        whole, broken = await ended_batch(desk, fleet, 2), await ended_batch(desk, fleet, 3)
        await move(desk)
        [file] = [one for one in await files(desk) if one.batch_id == broken.id]
        (tmp_path / file.name).write_bytes(b"x" * file.size)
        manifest = await desk.opened.batches.get(broken.id)
        assert await desk.opened.batches.run_of_line(manifest, "line-1") is None
        manifest = await desk.opened.batches.get(whole.id)
        assert await desk.opened.batches.run_of_line(manifest, "line-1") == run_id_of(whole.id, 1)


async def test_a_turn_lasts_as_long_as_its_process_moves(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others begin a few seconds after a process died, and not while one writes for long."""
    monkeypatch.setattr(archiving, "TURN_MS", 300)
    async with archive(redis_url, tmp_path, archive_after=0) as (desk, _):
        other = await open_store(desk.opened.settings)
        await ended(desk)
        place = desk.opened.reads.archived.place()
        begun, goes_on, write = asyncio.Event(), asyncio.Event(), place.write

        async def slow(name: str, data: bytes) -> None:
            begun.set()
            await goes_on.wait()
            await write(name, data)

        monkeypatch.setattr(place, "write", slow)
        moving = asyncio.create_task(move(desk))
        await begun.wait()
        until = asyncio.get_running_loop().time() + 1.0
        while asyncio.get_running_loop().time() < until:
            assert not await other.archiving.take("")
            await asyncio.sleep(0.05)  # polls, for more than three turns
        goes_on.set()
        assert (await moving).runs == 1
        assert await other.archiving.take("")
        await other.aclose()


async def test_runs_that_nobody_entered_are_found_by_a_later_look(
    redis_url: str, tmp_path: Path
) -> None:
    """Processes without the setting end runs without entering them."""
    async with archive(redis_url, tmp_path, archive_after=0) as (desk, fleet):
        run_id = await ended(desk)
        batch = await ended_batch(desk, fleet, 2)
        execute = desk.opened.connection.execute
        shard = desk.opened.keys.shard_of(run_id)
        await execute("ZREM", desk.opened.keys.aging(shard), run_id)
        await execute("ZREM", "sf:{archive}:batches", batch.id)
        recently = int((await desk.opened.connection.now()).timestamp() * 1000)
        await execute("HSET", STATE, "looked", recently)
        assert (await desk.opened.archiving.look()).runs == 0
        await execute("HSET", STATE, "looked", recently - archiving.GATHER_MS - 1000)
        assert (await desk.opened.archiving.look()).runs == 2
        assert await in_redis(desk, [*batch.run_ids(), run_id]) == [run_id]  # waits for others
        assert (await move(desk)).runs == 1


async def test_copies_of_a_process_that_died_are_counted_once(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with archive(redis_url, tmp_path) as (desk, fleet):
        await ended(desk)

        async def dies(*_: Any) -> None:
            raise ArchiveError("gone")

        with monkeypatch.context() as patch:
            patch.setattr(desk.opened.archiving, "_remove", dies)
            with pytest.raises(ArchiveError, match="gone"):
                await move(desk)
        assert (await move(desk)).runs == 1
        found = await fleet.archive.verify()
        assert (found.files, found.runs, found.damaged) == (2, 1, ())


async def test_who_waits_for_an_archived_run_learns_that_it_has_ended(
    redis_url: str, tmp_path: Path
) -> None:
    """As a call of a run that is retried, whose sub-agent's run ended long ago."""
    async with archive(redis_url, tmp_path) as (desk, _):
        well, badly = await ended(desk), await ended(desk, well=False)
        await move(desk)
        call = Work(await desk.create(batch=""), 1, 0)
        follow = desk.opened.links.follow
        assert [await follow(one, call) for one in (well, badly)] == ["completed", "failed"]


async def test_a_batch_that_ends_anew_while_it_moves_is_due_again(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with archive(redis_url, tmp_path, archive_after=0) as (desk, fleet):
        batch = await ended_batch(desk, fleet, 3, failing=[1])
        retried = run_id_of(batch.id, 1)
        entries, enter = desk.opened.archive_files, desk.opened.archive_files.enter

        async def entered(file: Any) -> None:
            await enter(file)
            if not file.is_whole:
                await fleet.runs.retry(retried)
                await end(desk, retried, "at last")
                await desk.keep_up()

        with monkeypatch.context() as patch:
            patch.setattr(entries, "enter", entered)
            assert (await desk.opened.archiving.move_batch(batch.id)).runs == 2
        assert await in_redis(desk, [*batch.run_ids()]) == [retried]
        execute = desk.opened.connection.execute
        # What changed while it was copied is looked at ten minutes later.
        assert await execute("ZADD", "sf:{archive}:batches", "XX", "CH", 1, batch.id) == 1
        assert (await move(desk)).runs == 1
        assert {one.output async for one in batch.results()} == {
            "answer 0",
            "at last",
            "answer 2",
        }


async def test_a_batch_that_ends_anew_before_it_is_copied_is_due_again(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with archive(redis_url, tmp_path, archive_after=0) as (desk, fleet):
        batch = await ended_batch(desk, fleet, 2, failing=[1])
        keep = desk.opened.upkeep.keep

        async def kept(batch_id: str) -> None:
            await keep(batch_id)
            await fleet.runs.retry(run_id_of(batch.id, 1))
            await end(desk, run_id_of(batch.id, 1), "at last")
            await desk.keep_up()

        with monkeypatch.context() as patch:
            patch.setattr(desk.opened.upkeep, "keep", kept)
            assert (await desk.opened.archiving.move_batch(batch.id)).runs == 2
        count = ("ZCARD", "sf:{archive}:batches")
        assert await desk.opened.connection.execute(*count) == 1
        assert (await move(desk)).runs == 0
        assert await desk.opened.connection.execute(*count) == 0


async def test_a_run_of_a_batch_whose_end_others_are_to_learn_goes_later(
    redis_url: str, tmp_path: Path
) -> None:
    async with archive(redis_url, tmp_path) as (desk, fleet):
        batch = await ended_batch(desk, fleet, 2)
        owing, execute = run_id_of(batch.id, 1), desk.opened.connection.execute
        key = desk.opened.keys.run(owing)
        await execute("HSET", key, "returns", "1")
        await execute("SADD", f"{key}:returns", "0 0 another")
        moved = await move(desk)
        assert (moved.runs, moved.left) == (1, 1)
        await execute("DEL", f"{key}:returns")
        await execute("ZADD", "sf:{archive}:batches", "XX", 1, batch.id)  # ten minutes later
        assert (await move(desk)).runs == 1
        assert not await in_redis(desk, [*batch.run_ids()])


async def test_a_file_whose_removals_were_not_answered_stays(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPS-05: Redis removes runs and its replies are lost; repeated, it says that they are gone."""
    async with archive(redis_url, tmp_path) as (desk, fleet):
        run_ids = [await ended(desk) for _ in range(3)]
        send = SweepPace.send

        async def repeated(self: SweepPace, calls: Any, items: int | None = None) -> list[Any]:
            await send(self, calls, items)
            return await send(self, calls, items)

        with monkeypatch.context() as patch:
            patch.setattr(SweepPace, "send", repeated)
            assert (await move(desk)).runs == 3
        assert len(await files(desk)) == 1
        assert all([(await fleet.runs.result(one)).success for one in run_ids])


@pytest.mark.parametrize(
    ("frames", "frame", "told"),
    [
        ([(0, 10), (10, 5)], 1, None),
        ([(0, 10), (11, 5)], 1, "its parts do not lie side by side"),
        ([(0, 10), (10, -5)], 1, "its parts do not lie side by side"),
        ([(0, 10), (10, 5)], 2, "run one is in none of its parts"),
        ([(0, 10), (10, 5)], -1, "run one is in none of its parts"),
    ],
)
def test_an_index_that_contradicts_itself_is_damaged(
    frames: list[tuple[int, int]], frame: int, told: str | None
) -> None:
    entry = ArchivedEntry("one", frame, 5, "completed", "agent")
    data = ZstdCompressor().compress(SegmentIndex(frames, [entry], {}).stored())
    if told is None:
        assert read_index(data).runs == [entry]
        return
    with pytest.raises(SerializationError, match=told):
        read_index(data)
