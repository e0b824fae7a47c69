"""Results of batches of which runs are archived: each once, whatever moves or has come back."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet
import pytest
from support.runs.archives import archive, end, ended_batch, files, in_redis, move
from support.workers.command_line import CommandLine

from stepfleet.orchestrator import AsyncBatch
from stepfleet.orchestrator.store.batches.batches import run_id_of
from stepfleet.orchestrator.store.runs import archiving

ROWS = 12


async def results(batch: AsyncBatch, **how: Any) -> list[tuple[Any, Any]]:
    """Return row and answer of each result."""
    return [(one.row, one.output) async for one in batch.results(**how)]


async def test_a_batch_that_is_half_archived_has_all_its_results(
    redis_url: str, tmp_path: Path
) -> None:
    """OPS-05: as they end, in order, the failed ones, and those that a caller does not know."""
    async with archive(redis_url, tmp_path) as (desk, fleet):
        batch = await ended_batch(desk, fleet, ROWS, failing=(3, 4))
        whole = [one async for one in batch.results(ordered=True)]
        expected = [(one.row, one.output) for one in whole]
        assert [row for row, _ in expected] == list(range(ROWS))
        assert (await move(desk)).runs == ROWS
        assert await in_redis(desk, list(batch.run_ids())) == []
        some = [run_id_of(batch.id, row) for row in (1, 3, 5, 11)]
        for back in (0, len(some)):
            assert await desk.opened.returning.restore(some[:back]) == back
            assert [one async for one in batch.results(ordered=True)] == whole
            for follow in (True, False):
                found = await results(batch, follow=follow)
                assert sorted(found) == sorted(expected)
            assert sorted(await results(batch, failed=True)) == [(3, None), (4, None)]
            known = {one.run_id: one.end_time for one in whole if one.row != 7}
            left = [one.row async for one in batch.results(known=known)]
            assert left == [7]


async def test_results_are_followed_while_runs_end_and_move(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPS-05: who follows a batch gets each run once though some are archived under way."""
    monkeypatch.setattr(archiving, "RUNS", 3)
    async with archive(redis_url, tmp_path) as (desk, fleet):
        lines = [{"id": f"l{n}", "input": "x"} for n in range(ROWS)]
        batch = await fleet.submit_batch(lines, agent=desk.agent)
        reading = asyncio.create_task(results(batch))
        in_order = asyncio.create_task(results(batch, ordered=True))
        for row in range(ROWS):
            await end(desk, run_id_of(batch.id, row), str(row))
        await desk.keep_up()
        assert (await move(desk)).runs == ROWS
        expected = [(row, str(row)) for row in range(ROWS)]
        assert await in_order == expected
        assert sorted(await reading) == expected


async def test_the_command_writes_archived_results(redis_url: str, tmp_path: Path) -> None:
    """OPS-05: lines, CSV and Parquet of an archived batch are those of the batch before."""
    async with archive(redis_url, tmp_path / "archive") as (desk, fleet):
        batch = await ended_batch(desk, fleet, ROWS, failing=(3,))

        command = CommandLine(tmp_path, STEPFLEET_REDIS_URL=redis_url)

        async def written(name: str) -> bytes:
            given = ("results", batch.id, "--out", name, "--ordered")
            done = await asyncio.to_thread(command, *given)
            assert done.returncode == 0, done.stderr
            return (tmp_path / name).read_bytes()

        names = ("a.jsonl", "a.csv", "a.parquet")
        before = [await written(name) for name in names]
        table = pyarrow.parquet.read_table(tmp_path / "a.parquet")
        assert (await move(desk)).runs == ROWS
        assert [await written(name) for name in names[:2]] == before[:2]
        await written(names[2])
        assert pyarrow.parquet.read_table(tmp_path / "a.parquet").equals(table)
        assert len(before[0].splitlines()) == ROWS
        assert orjson.loads(before[0].splitlines()[7])["id"] == "line-7"
        some = [run_id_of(batch.id, 7)]  # to a file of its own, which is then removed
        assert await desk.opened.returning.restore(some) == 1
        await move(desk)
        newest = max(await files(desk), key=lambda one: one.number)
        (tmp_path / "archive" / newest.name).unlink()
        told = await asyncio.to_thread(command, "results", batch.id, "--fields", "id")
        assert told.returncode == 1
        assert len(told.stdout.splitlines()) == ROWS - 1
        for part in (newest.name, some[0], "there is no such file", "1 result"):
            assert part in told.stderr
