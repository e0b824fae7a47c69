"""Keepers end by kill -9 wherever they can between Redis and the archive; others go on."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.deadlines import until, wait_until
from support.runs.archives import (
    archive,
    check_files,
    ended,
    ended_batch,
    in_redis,
    listed,
    older,
    seen,
)
from support.servers.redis_servers import short_folder
from support.workers.keeper_process import KeeperProcess

from stepfleet.worker.runtime.crash_points import ARCHIVE_POINTS

StartKeeper = Callable[..., KeeperProcess]
IN_THE_GATE = "archive-removing"
LONG = 60.0
HOURS = 7_200_000

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def keeper(redis_url: str, tmp_path: Path) -> Iterator[StartKeeper]:
    """Start real keepers with an archive: `keeper(name, CRASH_AT=..., ...)`."""
    with contextlib.ExitStack() as cleanup:
        folder: Path = cleanup.enter_context(short_folder())

        def start(name: str, **env: str) -> KeeperProcess:
            told = {"ARCHIVE_URL": f"file://{tmp_path}/archive", "ARCHIVE_AFTER": "0", **env}
            given = {f"STEPFLEET_{key}": value for key, value in told.items()}
            one = KeeperProcess(folder, redis_url, name=name, env=given)
            cleanup.callback(one.end)
            return one.launch()

        yield start


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(one, marks=() if one == IN_THE_GATE else pytest.mark.chaos)
        for one in ARCHIVE_POINTS
    ],
)
async def test_who_dies_between_redis_and_the_archive_loses_nothing(
    point: str, redis_url: str, tmp_path: Path, keeper: StartKeeper
) -> None:
    """OPS-05: a batch and runs alone; each is read as before, listed once, in one known file."""
    died = tmp_path / "died"
    async with archive(redis_url, tmp_path / "archive") as (desk, fleet):
        batch = await ended_batch(desk, fleet, 20, failing=(3,))
        alone = [await ended(desk, well=number > 0) for number in range(20)]
        for one in alone:  # they have waited for others for long: a file is worth while
            aging = desk.opened.keys.aging(desk.opened.keys.shard_of(one))
            await desk.opened.connection.execute("ZINCRBY", aging, -HOURS, one)
        ids = [*alone, *batch.run_ids()]
        watched = ids[::5]
        before = [await seen(fleet, one) for one in watched]
        results = [one async for one in batch.results(ordered=True)]
        in_lists = await listed(fleet)
        victim = keeper("victim", CRASH_AT=f"{point}:2", CRASH_ONCE=str(died))
        wait_until(died.exists, within=LONG, what="the death")
        assert victim.wait() == -signal.SIGKILL
        await desk.opened.connection.execute("DEL", "sf:{archive}:turn")  # three minutes later
        assert [await seen(fleet, one) for one in watched] == before
        assert [one async for one in batch.results(ordered=True)] == results
        keeper("heir")

        async def moved() -> bool:
            return not await in_redis(desk, ids)

        await until(moved, within=LONG, what="all runs in the archive")
        assert [await seen(fleet, one) for one in watched] == before
        assert [one async for one in batch.results(ordered=True)] == results
        found = {one.row: one async for one in batch.results()}
        assert [found[one.row] for one in results] == results
        assert len([one async for one in batch.results()]) == len(results)
        assert await listed(fleet) == in_lists
        assert await listed(fleet, 7, status="failed") == [
            one for one in in_lists if one in {alone[0], ids[23]}
        ]
        await older(desk)
        await check_files(desk)
