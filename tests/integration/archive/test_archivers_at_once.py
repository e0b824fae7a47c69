"""Several who archive and bring back at once, and processes that sleep: nothing lost or twice."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
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
    listed,
    move,
    older,
    seen,
)
from support.runs.stored_runs import Bench, answered

from stepfleet.orchestrator import ConflictError
from stepfleet.orchestrator.errors import ArchiveError
from stepfleet.orchestrator.store.pace import SweepPace
from stepfleet.orchestrator.store.runs import archiving
from stepfleet.orchestrator.store.runs.archive_files import ENTER_MS

TURN = "sf:{archive}:turn"


async def sleeps(
    desk: Bench, point: str, meanwhile: Callable[[], Awaitable[None]], monkeypatch: Any
) -> None:
    """Have a process move all and sleep at a point, with the turn lost, while others do a thing.

    It sleeps by its place's `write` or `read`, by Redis's scripts, or at its own points: between
    any two commands a process may be stopped.
    """
    archiver, reached, woken = desk.opened.archiving, asyncio.Event(), asyncio.Event()
    entries = desk.opened.archive_files
    verify, remove, enter = archiver._verify, archiver._remove, entries.enter

    async def asleep(*_: Any) -> None:
        reached.set()
        await woken.wait()

    async def verified(*given: Any) -> None:
        if point == "written":
            await asleep()
        await verify(*given)
        if point == "verified":
            await asleep()

    async def removed(*given: Any) -> Any:
        if point == "entered":
            await asleep()
        return await remove(*given)

    async def entered(file: Any) -> None:
        await enter(file)
        if point == "begun" and not file.is_whole:
            await asleep()

    with monkeypatch.context() as patch:
        patch.setattr(archiver, "_verify", verified)
        patch.setattr(archiver, "_remove", removed)
        patch.setattr(entries, "enter", entered)
        moving = asyncio.create_task(move(desk))
        await reached.wait()
        await desk.opened.connection.execute("DEL", TURN)  # it has slept for longer than a turn
        await meanwhile()
        woken.set()
        with suppress(ArchiveError):  # its file was removed meanwhile
            await moving


@pytest.mark.parametrize("point", ["begun", "written", "verified", "entered"])
async def test_a_process_that_sleeps_and_wakes_late_loses_nothing(
    point: str, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPS-05: its turn is another's, which moves the same runs, an hour goes by, and it goes on."""
    async with (
        archive(redis_url, tmp_path) as (desk, fleet),
        archive(redis_url, tmp_path) as (other, _),
    ):
        batch = await ended_batch(desk, fleet, 5)
        ids = [await ended(desk), *batch.run_ids()]
        before = [await seen(fleet, one) for one in ids]

        async def taken_over() -> None:
            assert (await move(other)).runs in (5, 6)  # of the batch or of those without one
            await older(other)

        await sleeps(desk, point, taken_over, monkeypatch)
        await move(other)
        assert await in_redis(desk, ids) == []
        assert [await seen(fleet, one) for one in ids] == before
        assert sorted(await listed(fleet)) == sorted(ids)
        await older(other)
        await check_files(other)
        assert sum(one.runs for one in await files(other)) == len(ids)


async def test_what_comes_back_while_its_file_gets_more_runs_loses_none(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPS-05: a file is not removed as empty while runs may come into it."""
    async with (
        archive(redis_url, tmp_path) as (desk, fleet),
        archive(redis_url, tmp_path) as (other, _),
    ):
        ids = [await ended(desk) for _ in range(24)]
        before = [await fleet.runs.result(one) for one in ids]
        send, returned = SweepPace.send, asyncio.Event()

        async def first(pace: Any, calls: Any, items: int | None = None) -> Any:
            found = await send(pace, calls, items)
            gone = list(await other.opened.reads.archived.where(ids))
            if gone and not returned.is_set():
                returned.set()
                assert len(gone) < len(ids)
                assert await other.opened.returning.restore(gone) == len(gone)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(SweepPace, "send", first)
            await move(desk)
        assert returned.is_set()
        assert [await fleet.runs.result(one) for one in ids] == before
        await move(desk)
        await older(desk)
        assert [await fleet.runs.result(one) for one in ids] == before
        await check_files(desk)


async def test_redis_itself_refuses_who_is_too_late(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPS-05: a file gets no run half an hour after its name was entered."""
    async with archive(redis_url, tmp_path) as (desk, fleet):
        run_id = await ended(desk)
        monkeypatch.setattr(archiving, "ENTER_MS", -1)
        assert (await move(desk)).runs == 0
        assert await in_redis(desk, [run_id]) == [run_id]
        await check_files(desk)
        monkeypatch.setattr(archiving, "ENTER_MS", ENTER_MS)
        assert (await move(desk)).runs == 1
        assert (await fleet.runs.result(run_id)).success


async def test_one_process_at_a_time_moves_runs(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPS-05: of several each run is moved once; by hand, who comes second is told."""
    monkeypatch.setattr(archiving, "BY_HAND_SECONDS", 0.3)
    async with (
        archive(redis_url, tmp_path, archive_after=0) as (desk, fleet),
        archive(redis_url, tmp_path, archive_after=0) as (other, _),
    ):
        ids = list((await ended_batch(desk, fleet, 8)).run_ids())
        both = (desk.opened.archiving.look(), other.opened.archiving.look())
        assert sum(one.runs for one in await asyncio.gather(*both)) == len(ids)
        assert await desk.opened.archiving.take("")
        assert (await other.opened.archiving.look()).runs == 0
        with pytest.raises(ConflictError, match="another process"):
            await move(other)
        await desk.opened.archiving.release("")
        assert sum(one.runs for one in await files(desk)) == len(ids)
        await check_files(desk)


@pytest.mark.parametrize("ends", [False, True])
async def test_a_run_that_changes_while_it_is_copied_stays(
    *, ends: bool, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPS-05: a file that has a run as it was before it went on is not where it is read."""
    async with archive(redis_url, tmp_path) as (desk, fleet):
        changed, same = await ended(desk), await ended(desk)

        async def goes_on() -> None:
            await fleet.runs.send(changed, "and now?")
            if ends:
                claim = await desk.claim(changed, 1)
                await desk.commit(claim, answered(claim, "now this"))

        await sleeps(desk, "entered", goes_on, monkeypatch)
        # One that has ended anew goes as it is now, to another file.
        assert await in_redis(desk, [changed, same]) == ([] if ends else [changed])
        stored = await fleet.runs.show(changed)
        assert stored.state.status.is_terminal is ends
        assert stored.state.messages[-1].text == ("now this" if ends else "and now?")
        assert set(await listed(fleet)) == {changed, same}
