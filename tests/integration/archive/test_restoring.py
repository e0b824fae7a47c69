"""Runs come back from the archive, go on, and move again; what is known of them stays one thing."""

import asyncio
from pathlib import Path

import pytest
from redis import Redis
from support.runs.archives import (
    archive,
    check_files,
    end,
    ended,
    ended_batch,
    files,
    in_redis,
    is_known,
    listed,
    move,
    older,
    seen,
)

from stepfleet.orchestrator import ConflictError, RunStatus
from stepfleet.orchestrator.store.runs import returning


async def test_a_run_comes_back_is_retried_and_moves_again(redis_url: str, tmp_path: Path) -> None:
    """OPS-05: changes are refused while it is away, and the refusal names the command."""
    async with archive(redis_url, tmp_path) as (desk, fleet):
        run_id, other = await ended(desk, well=False), await ended(desk)
        await move(desk)
        for change in (fleet.runs.retry(run_id), fleet.runs.send(run_id, "and now?")):
            with pytest.raises(ConflictError, match=f"stepfleet archive --restore {run_id}"):
                await change
        assert (await fleet.runs.cancel(run_id)).outcome == "ended"
        before = await seen(fleet, run_id)
        assert await desk.opened.returning.restore([run_id, "unknown", run_id]) == 1
        assert await desk.opened.returning.restore([run_id]) == 0
        assert await seen(fleet, run_id) == before
        await fleet.runs.retry(run_id)
        await end(desk, run_id, "better")
        assert (await fleet.runs.result(run_id)).status is RunStatus.COMPLETED
        assert (await move(desk)).runs == 1
        assert (await fleet.runs.result(run_id)).output == "better"
        assert sorted(await listed(fleet)) == sorted([other, run_id])
        assert await listed(fleet, status="failed") == []  # as its first file has it
        await older(desk)
        assert sum(one.runs for one in await files(desk)) == 3
        await desk.opened.returning.restore([run_id])
        assert len(await files(desk)) == 1  # all of its file is back
        await desk.opened.returning.restore([other])
        assert await files(desk) == []
        await check_files(desk)
        assert set(await in_redis(desk, [run_id, other])) == {run_id, other}


async def test_one_run_of_a_batch_comes_back_and_the_batch_is_due_again(
    redis_url: str, tmp_path: Path
) -> None:
    """OPS-05: what was brought back is archived anew, also where it is not the whole batch."""
    async with archive(redis_url, tmp_path) as (desk, fleet):
        batch = await ended_batch(desk, fleet, 5, failing=(2,))
        ids = list(batch.run_ids())
        assert (await move(desk)).runs == 5
        with pytest.raises(ConflictError, match="archive --restore"):
            await batch.retry()
        assert await desk.opened.returning.restore(ids[2:3]) == 1
        assert (await move(desk)).runs == 1
        assert await desk.opened.returning.restore(ids[2:3]) == 1
        assert await batch.retry() == 1
        await end(desk, ids[2], "better")
        await desk.keep_up()
        assert (await move(desk)).runs == 1
        assert (await fleet.runs.result(ids[2])).output == "better"
        manifest = await desk.opened.batches.get(batch.id)
        assert await desk.opened.returning.restore_batch(manifest) == 5
        assert await in_redis(desk, ids) == ids
        assert (await batch.progress()).completed == 5
        assert (await move(desk)).runs == 5
        await older(desk)
        await check_files(desk)
        assert len(await files(desk)) == 1


async def test_a_purge_removes_archived_runs_only_where_it_is_told(
    redis_url: str, tmp_path: Path
) -> None:
    """OPS-05: by whole files; nothing is left of them, and what is back in Redis goes too."""
    async with archive(redis_url, tmp_path) as (desk, fleet):
        batch = await ended_batch(desk, fleet, 3)
        single = await ended(desk)
        await move(desk)
        assert await fleet.runs.purge() == 0
        with pytest.raises(ConflictError, match="archived"):
            await fleet.runs.purge(batch=batch.id)
        assert await fleet.runs.purge(archived=True, older_than=3600) == 0
        ids = list(batch.run_ids())
        await desk.opened.returning.restore(ids[:1])
        assert await fleet.runs.purge(batch=batch.id, archived=True, dry_run=True) >= 3
        assert await fleet.runs.purge(batch=batch.id, archived=True) >= 3
        assert not [one for one in ids if await is_known(fleet, one)]
        assert await listed(fleet) == [single]
        assert await fleet.runs.purge(archived=True) == 1
        assert await files(desk) == []
        await check_files(desk)
        with Redis.from_url(redis_url, decode_responses=True) as client:
            assert not list(client.scan_iter("*archived:*"))
            assert not [key for key in client.scan_iter("*") if ids[0] in key]


class Ended(BaseException):
    """What ends a process; no code catches it."""


async def test_an_interrupted_return_leaves_the_archived_run(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPS-05: parts that nobody puts together are no run, expire, and harm no later return."""
    async with archive(redis_url, tmp_path) as (desk, fleet):
        run_id = await ended(desk)
        await move(desk)
        before = await seen(fleet, run_id)
        send, writes = desk.opened.connection.send, 0

        def dies(*command: object) -> object:
            nonlocal writes
            writes += command[0] == "HSET"
            if writes == 3:
                raise Ended
            return send(*command)

        with monkeypatch.context() as patch:
            patch.setattr(desk.opened.connection, "send", dies)
            with pytest.raises(Ended):
                await desk.opened.returning.restore([run_id])
        with Redis.from_url(redis_url, decode_responses=True) as client:
            left = [key for key in client.scan_iter("*") if run_id in key]
            assert len(left) == 2
            assert all(0 < client.ttl(key) <= returning._BACK_MS / 1000 for key in left)
        assert await in_redis(desk, [run_id]) == []
        assert await seen(fleet, run_id) == before
        assert await desk.opened.returning.restore([run_id]) == 1
        assert await seen(fleet, run_id) == before


async def test_a_return_that_took_too_long_changes_nothing(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPS-05: where a part has expired before all were there, the run stays archived."""
    async with archive(redis_url, tmp_path) as (desk, fleet):
        run_id = await ended(desk)
        await move(desk)
        before = await seen(fleet, run_id)
        send = desk.opened.connection.send

        def late(*command: object) -> object:
            if command[0] == "PEXPIRE" and ":events" in str(command[1]):
                send("DEL", str(command[1]).replace(":events", ":log"))
            return send(*command)

        with monkeypatch.context() as patch:
            patch.setattr(desk.opened.connection, "send", late)
            assert await desk.opened.returning.restore([run_id]) == 0
        assert await in_redis(desk, [run_id]) == []
        assert await seen(fleet, run_id) == before


async def test_two_who_bring_back_the_same_runs_bring_each_once(
    redis_url: str, tmp_path: Path
) -> None:
    """OPS-05"""
    async with (
        archive(redis_url, tmp_path) as (desk, fleet),
        archive(redis_url, tmp_path) as (other, _),
    ):
        ids = [await ended(desk) for _ in range(8)]
        await move(desk)
        before = [await seen(fleet, one) for one in ids]
        both = (desk.opened.returning.restore(ids), other.opened.returning.restore(ids[::-1]))
        assert sum(await asyncio.gather(*both)) == len(ids)
        assert [await seen(fleet, one) for one in ids] == before
        assert await in_redis(desk, ids) == ids
