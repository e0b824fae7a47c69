"""The version of a run's records in the store: noted by its first writer of newer ones."""

from collections.abc import AsyncIterator

import pytest
from stored_runs import Bench, answered, bench, called

from stepfleet.orchestrator.protocol.claim import Refused
from stepfleet.orchestrator.protocol.revision import revise
from stepfleet.orchestrator.records.base import SCHEMA_VERSION
from stepfleet.orchestrator.store.versions import note_version

OURS, OLDER, NEWER = str(SCHEMA_VERSION), str(SCHEMA_VERSION - 1), str(SCHEMA_VERSION + 1)


@pytest.fixture
async def desk(redis_url: str) -> AsyncIterator[Bench]:
    async with bench(redis_url, grace=60) as opened:
        yield opened


async def become(desk: Bench, run_id: str, version: str) -> None:
    await desk.opened.connection.execute("HSET", desk.opened.keys.run(run_id), "v", version)


async def test_a_claim_notes_that_an_older_run_gets_newer_records(desk: Bench) -> None:
    """SER-24: before anything of the step is written."""
    run_id = await desk.create()
    await become(desk, run_id, OLDER)
    claim = await desk.claim(run_id)
    assert (await desk.header(run_id))["v"] == OURS
    await desk.commit(claim, answered(claim))
    assert (await desk.stored(run_id)).result().success


async def test_a_run_without_a_version_is_an_older_one(desk: Bench) -> None:
    """SER-24"""
    run_id = await desk.create()
    await desk.opened.connection.execute("HDEL", desk.opened.keys.run(run_id), "v")
    assert (await desk.stored(run_id)).result().run_id == run_id
    await desk.claim(run_id)
    assert (await desk.header(run_id))["v"] == OURS


async def test_reading_an_older_run_changes_nothing(desk: Bench) -> None:
    """SER-24"""
    run_id = await desk.create()
    await become(desk, run_id, OLDER)
    await desk.stored(run_id)
    assert (await desk.header(run_id))["v"] == OLDER


async def test_an_older_run_that_is_taken_up_again_is_noted_too(desk: Bench) -> None:
    """SER-24"""
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    await desk.commit(claim, called(claim))
    claim = await desk.claim(run_id, step=1)
    await desk.commit(claim, called(claim, error=True))
    await become(desk, run_id, OLDER)
    ended = await desk.stored(run_id)
    revision = revise(ended.state, ended.log, {"max_steps": 20}, await desk.runs.now())
    assert (await desk.control.retry(ended, revision)).word == "retried"
    assert (await desk.header(run_id))["v"] == OURS


async def test_a_noted_version_never_goes_down(desk: Bench) -> None:
    """SER-24: nor does the note make a run of what is none."""
    run_id = await desk.create()
    await become(desk, run_id, NEWER)
    await note_version(desk.opened.connection, desk.opened.keys, run_id)
    assert (await desk.header(run_id))["v"] == NEWER
    await note_version(desk.opened.connection, desk.opened.keys, "nobody")
    assert not await desk.header("nobody")


async def test_a_newer_run_is_tried_at_growing_intervals_of_a_rollouts_length(desk: Bench) -> None:
    """SER-24, DIST-14: the last of the old workers do not put it off for minutes."""
    run_id = await desk.create()
    await become(desk, run_id, NEWER)
    waits = []
    for _ in range(6):
        assert (await desk.refused(run_id)).why is Refused.UNREADABLE
        header = await desk.header(run_id)
        waits.append(round((int(header["not_before"]) - int(header["updated"])) / 1000))
        await desk.opened.connection.execute(
            "HSET", desk.opened.keys.run(run_id), "not_before", "0"
        )
    assert waits == [60, 120, 240, 480, 480, 480]
