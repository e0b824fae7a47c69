"""What `doctor`, the fleet's page and metrics say of an archive: in use, behind, failing, wrong."""

from datetime import timedelta
from pathlib import Path

import pytest
from support.archives import long_known
from support.servers.object_storage import ObjectStorage

from stepfleet.orchestrator import Agent, ArchiveError, AsyncFleet
from stepfleet.orchestrator.client.fleet import store_of
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store.fleet import checks
from stepfleet.orchestrator.store.fleet.checks import (
    Check,
    State,
    archive_place,
    fleet_checks,
    read_fleet,
)
from stepfleet.orchestrator.store.fleet.figures import fleet_figures
from stepfleet.worker.telemetry.metrics import FleetMetrics

AGENT = Agent("plain", model="openai:none")


async def found(fleet: AsyncFleet) -> list[Check]:
    """Return what the checks of the fleet say of its archive."""
    read = await read_fleet(await store_of(fleet))
    return [one for one in fleet_checks(read, "agents") if one.check == "archive"]


async def gauges(fleet: AsyncFleet) -> dict[str, float | None]:
    """Return what a process that reads the fleet's figures serves."""
    metrics = FleetMetrics()
    metrics.show_fleet(await fleet_figures(await store_of(fleet)))
    names = ("archived_runs", "archive_due_runs", "archive_overdue_seconds")
    return {
        name: metrics.registry.get_sample_value(f"stepfleet_{name}")
        for name in (*names, "archive_failing_seconds")
    }


async def ended(fleet: AsyncFleet) -> str:
    run_id = await fleet.submit(AGENT, "x")
    await fleet.runs.cancel(run_id)
    return run_id


async def test_an_archive_in_use_is_fine_also_where_it_is_not_named(
    redis_url: str, tmp_path: Path
) -> None:
    """OPS-05: a fleet without one says nothing of it."""
    settings = load_settings(redis_url=redis_url, archive_url=tmp_path.as_uri())
    async with AsyncFleet(redis_url) as without:
        assert await found(without) == []
        assert set((await gauges(without)).values()) == {None}
        long_known(redis_url)
        async with AsyncFleet(settings=settings) as fleet:
            await ended(fleet)
            await fleet.archive.move(older_than=0)
            (check,) = await found(fleet)
        assert check.state is State.OK
        assert f"runs moved: 1, files: 1 ({tmp_path.as_uri()})" in check.found
    async with AsyncFleet(redis_url) as without:
        (check,) = await found(without)
        assert check.state is State.OK
        assert "not named here" in check.found
        seen = await gauges(without)
        assert (seen["archived_runs"], seen["archive_failing_seconds"]) == (1, 0)


async def test_a_failing_archive_is_told_with_its_reason_and_since_when(
    redis_url: str, tmp_path: Path
) -> None:
    """OPS-05: runs stay in Redis meanwhile."""
    (tmp_path / "file").write_text("no folder")
    url = (tmp_path / "file" / "archive").as_uri()
    long_known(redis_url)
    settings = load_settings(redis_url=redis_url, archive_url=url, archive_after=0)
    async with AsyncFleet(settings=settings) as fleet:
        await ended(fleet)
        batch = await fleet.submit_batch([{"id": "1", "input": "x"}], AGENT)
        await batch.cancel()
        archiving = (await store_of(fleet)).archiving
        await archiving.gather()
        with pytest.raises(ArchiveError):
            await archiving.look()
        (check,) = await found(fleet)
        assert check.state is State.WARN
        assert "fails since" in check.found
        assert "file/archive" in check.found
        state = await fleet.archive.state()
        assert state.failing_since is not None
        (later,) = checks.archive(state.model_copy(update={"failing_seconds": 7200.0}))
        assert later.state is State.FAIL
        seen = await gauges(fleet)
        assert (seen["archived_runs"], seen["archive_due_runs"]) == (0, 1)
        assert 0 < (seen["archive_failing_seconds"] or 0) < 300
        (tmp_path / "file").unlink()
        await archiving.look()
        (check,) = await found(fleet)
        assert check.state is State.OK


async def test_runs_that_nobody_moves_are_told(redis_url: str, tmp_path: Path) -> None:
    """OPS-05: those due for hours; a few may wait an hour for others."""
    settings = load_settings(redis_url=redis_url, archive_url=tmp_path.as_uri(), archive_after=60)
    async with AsyncFleet(settings=settings) as fleet:
        run_id = await ended(fleet)
        (check,) = await found(fleet)
        assert check.state is State.OK
        store = await store_of(fleet)
        aging = store.keys.aging(store.keys.shard_of(run_id))
        long_ago = (await store.connection.now()) - timedelta(hours=5)
        at = round(long_ago.timestamp() * 1000)
        await store.connection.execute("ZADD", aging, "XX", at, run_id)
        (check,) = await found(fleet)
        assert check.state is State.WARN
        assert "due: 1 runs, 0 batches; the first for 5 h" in check.found
        seen = (await gauges(fleet))["archive_overdue_seconds"] or 0
        assert 5 * 3600 - 61 <= seen < 5 * 3600 + 300


@pytest.mark.parametrize(
    ("url", "state", "said"),
    [
        ("file://{folder}/new/archive", State.OK, "takes, gives and removes files"),
        ("file://{folder}/file/archive", State.FAIL, "cannot write"),
        ("gopher://host/folder", State.FAIL, "fsspec knows no protocol"),
        ("gs://bucket/folder", State.FAIL, "pip install gcsfs"),
    ],
)
async def test_the_place_is_tried_with_a_small_file(
    tmp_path: Path, url: str, state: State, said: str
) -> None:
    (tmp_path / "file").write_text("no folder")
    check = await archive_place(load_settings(archive_url=url.format(folder=tmp_path)))
    assert (check.state, said in check.found) == (state, True), check
    assert bool(check.fix) is (state is State.FAIL)
    assert not list(tmp_path.rglob("check-*"))


async def test_a_bucket_that_refuses_fails_without_its_secret(storage: ObjectStorage) -> None:
    url = storage.url(storage.bucket("health"))
    assert (await archive_place(load_settings(archive_url=url))).state is State.OK
    with storage.refusing():
        refused = await archive_place(load_settings(archive_url=url))
    assert refused.state is State.FAIL
    assert "s3://health" in refused.found
    assert "made-up-secret" not in f"{refused}"
