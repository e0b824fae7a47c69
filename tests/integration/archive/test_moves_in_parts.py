"""How runs are read for a file, and which: long ones by themselves, those of one time together."""

import random
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from support.runs.archives import archive, check_files, ended, files, move, seen

from stepfleet.orchestrator.store.runs import archiving
from stepfleet.orchestrator.store.runs.copying import READ_BYTES

LONG_TEXT = b64encode(random.Random(1).randbytes(READ_BYTES * 9 // 16)).decode()
"""Three quarters of what is read together, and nothing to compress."""


async def test_long_runs_are_read_by_themselves(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPS-05: memory of what moves runs does not grow with how many long ones there are."""
    async with archive(redis_url, tmp_path) as (desk, fleet):
        long = [await ended(desk, LONG_TEXT + str(n)) for n in range(3)]
        short = [await ended(desk) for _ in range(5)]
        before = {one: await seen(fleet, one) for one in (long[0], short[0])}
        copying: Any = desk.opened.archiving._copying
        read, groups = copying.read, []

        async def spied(looks: Any) -> Any:
            groups.append({one.run_id: sum(one.sizes) for one in looks})
            return await read(looks)

        monkeypatch.setattr(copying, "read", spied)
        assert (await move(desk)).runs == 8
        assert all(len(one) == 1 or sum(one.values()) <= READ_BYTES for one in groups)
        assert len(groups) >= 3
        assert min(size for one in groups for run, size in one.items() if run in long) > 700_000
        assert max(len(one) for one in groups) > 1
        await check_files(desk)
        assert {one: await seen(fleet, one) for one in before} == before


async def test_a_file_has_runs_that_ended_one_after_the_other(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPS-05: over all shards, so that a list opens few files."""
    monkeypatch.setattr(archiving, "RUNS", 4)
    async with archive(redis_url, tmp_path) as (desk, _):
        runs = [await ended(desk) for _ in range(12)]
        assert len({desk.opened.keys.shard_of(one) for one in runs}) > 1
        for n, one in enumerate(runs):
            key = desk.opened.keys.aging(desk.opened.keys.shard_of(one))
            await desk.opened.connection.execute("ZADD", key, "XX", n + 1, one)
        assert (await move(desk)).files == 3
        places = await desk.opened.reads.archived.where(runs)
        numbers = [places[one].number for one in runs]
        assert numbers == sorted(numbers)
        assert sorted(one.runs for one in await files(desk)) == [4, 4, 4]
