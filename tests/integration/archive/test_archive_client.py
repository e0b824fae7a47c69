"""`fleet.archive`: what it counts, what it refuses, and that it shares the work with others."""

import math
import time
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest
from support.archives import long_known

from stepfleet.orchestrator import (
    Agent,
    AsyncFleet,
    ConfigurationError,
    ConflictError,
    NotFoundError,
)
from stepfleet.orchestrator.client.fleet import store_of
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store.runs import archiving, verifying

AGENT = Agent("plain", model="openai:none")


@pytest.fixture
async def fleet(redis_url: str, tmp_path: Path) -> AsyncIterator[AsyncFleet]:
    long_known(redis_url)
    settings = load_settings(redis_url=redis_url, archive_url=tmp_path.as_uri())
    async with AsyncFleet(settings=settings) as opened:
        yield opened


async def ended(fleet: AsyncFleet, many: int = 1) -> list[str]:
    runs = [await fleet.submit(AGENT, "x") for _ in range(many)]
    for run_id in runs:
        await fleet.runs.cancel(run_id)
    return runs


async def test_unknown_ids_are_named_before_anything_is_brought_back(fleet: AsyncFleet) -> None:
    """OPS-05"""
    first, second = await ended(fleet, 2)
    await fleet.archive.move(older_than=0)
    strange = str(uuid4())
    with pytest.raises(NotFoundError, match=f"{strange}, none"):
        await fleet.archive.restore([first, strange, "none"])
    assert await fleet.archive.restore([first, first, second]) == 2
    assert await fleet.archive.restore([first]) == 0


async def test_a_dry_run_counts_runs_and_those_of_batches_and_moves_none(
    fleet: AsyncFleet,
) -> None:
    """OPS-05"""
    await ended(fleet, 2)
    batch = await fleet.submit_batch([{"id": str(one), "input": "x"} for one in range(3)], AGENT)
    assert (await fleet.archive.move(older_than=0, dry_run=True)).runs == 2
    await batch.cancel()
    assert (await fleet.archive.move(older_than=3600, dry_run=True)).runs == 0
    assert (await fleet.archive.move(older_than=0, dry_run=True)).runs == 5
    seen: list[int] = []
    moved = await fleet.archive.move(older_than=0, on_progress=seen.append)
    assert (moved.runs, moved.files, seen[-1]) == (5, 2, 5)
    assert await fleet.archive.restore([batch.id]) == 3


@pytest.mark.parametrize("wrong", [-1, math.nan, math.inf])
async def test_what_makes_no_sense_names_the_field(fleet: AsyncFleet, wrong: float) -> None:
    with pytest.raises(ConfigurationError, match="older_than is"):
        await fleet.archive.move(older_than=wrong)
    for ids in ((), ""):
        with pytest.raises(ConfigurationError, match="ids is empty"):
            await fleet.archive.restore(ids)


async def test_who_moves_by_hand_waits_for_another_that_moves(
    fleet: AsyncFleet, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ended(fleet)
    settings = load_settings(redis_url=redis_url, archive_url=tmp_path.as_uri())
    async with AsyncFleet(settings=settings) as other:
        held = (await store_of(other)).archiving
        assert await held.take("")
        with monkeypatch.context() as short:
            short.setattr(archiving, "BY_HAND_SECONDS", 0.2)
            with pytest.raises(ConflictError, match="another process moves runs"):
                await fleet.archive.move(older_than=0)
        await held.release("")
    assert (await fleet.archive.move(older_than=0)).runs == 1


async def test_the_runs_of_many_damaged_files_are_counted_and_of_some_named(
    fleet: AsyncFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPS-05: what is named is bounded, however much is lost."""
    monkeypatch.setattr(verifying, "MOST_NAMED", 1)
    for _ in range(2):
        await ended(fleet)
        await fleet.archive.move(older_than=0)
    for file in tmp_path.iterdir():
        file.unlink()
    seen: list[int] = []
    found = await fleet.archive.verify(on_progress=seen.append)
    assert (found.files, found.runs, seen) == (2, 0, [1, 2])
    assert sorted((one.runs, len(one.run_ids)) for one in found.damaged) == [(1, 0), (1, 1)]


async def test_a_first_move_waits_until_all_clients_know_of_the_archive(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPS-05: also after a dry run; and then it moves what is due."""
    monkeypatch.setattr(archiving, "LOOK_SECONDS", 0.3)
    settings = load_settings(redis_url=redis_url, archive_url=tmp_path.as_uri())
    async with AsyncFleet(settings=settings) as fleet:
        await ended(fleet)
        began = time.monotonic()
        assert (await fleet.archive.move(older_than=0, dry_run=True)).runs == 1
        assert (await fleet.archive.move(older_than=0)).runs == 1
        assert time.monotonic() - began >= 0.6
