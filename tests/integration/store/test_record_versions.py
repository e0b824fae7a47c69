"""The version of a run's records in the store: noted by its first writer of newer ones."""

from typing import Any

import pytest
from support.runs.opened_runs import opened_run
from support.runs.packed_records import repacked
from support.runs.scripted_steps import call, say
from support.runs.stored_runs import Bench, answered, called
from support.runs.waits import let_pass, wait_of

from stepfleet.orchestrator import AsyncFleet, tool
from stepfleet.orchestrator.errors import SerializationError
from stepfleet.orchestrator.protocol.claim import Refused
from stepfleet.orchestrator.protocol.revision import revise
from stepfleet.orchestrator.records.base import SCHEMA_VERSION
from stepfleet.orchestrator.store.codec import load_wait
from stepfleet.orchestrator.store.lua import RunScripts
from stepfleet.orchestrator.store.runs.reading import next_attempt
from stepfleet.orchestrator.version import own_build

OURS, OLDER, NEWER = str(SCHEMA_VERSION), str(SCHEMA_VERSION - 1), str(SCHEMA_VERSION + 1)


BENCH: dict[str, Any] = {"grace": 60}


@tool(queue="gpu")
async def render(what: str) -> str:
    """Make a picture on another machine."""
    return f"rendered {what}"


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


async def test_a_run_without_a_version_is_older_than_what_is_read(desk: Bench) -> None:
    """SER-24: such runs were written before there was a version 1."""
    run_id = await desk.create()
    await desk.opened.connection.execute("HDEL", desk.opened.keys.run(run_id), "v")
    assert (await desk.refused(run_id)).why is Refused.UNREADABLE
    with pytest.raises(SerializationError, match="have version 0"):
        await desk.stored(run_id)


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
    assert (await desk.control.retry(ended, revision)).outcome == "retried"
    assert (await desk.header(run_id))["v"] == OURS


async def test_a_tool_call_on_its_own_queue_notes_it_too(redis_url: str) -> None:
    """SER-24, DIST-15: its result is a record of the run; newer ones are left."""
    script = (call(("render", {"what": "a"})), say("done"))
    async with opened_run(redis_url, *script, tools=(render,)) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        await become(desk, run_id, NEWER)
        refused = await hands.call(run_id, 0, 0)
        assert refused.refusal is not None
        assert refused.refusal.why is Refused.UNREADABLE
        assert "upgrade this worker" in refused.refusal.detail
        await become(desk, run_id, OLDER)
        assert (await hands.call(run_id, 0, 0)).applied
        assert (await desk.header(run_id))["v"] == OURS


async def test_a_noted_version_never_goes_down(desk: Bench) -> None:
    """SER-24: nor does the note make a run of what is none."""
    run_id = await desk.create()
    await become(desk, run_id, NEWER)
    scripts = RunScripts(desk.opened.connection, desk.opened.keys)
    await scripts.ensure_version(run_id, {"v": OLDER})
    assert (await desk.header(run_id))["v"] == NEWER
    await scripts.ensure_version("nobody", {"v": OLDER})
    assert not await desk.header("nobody")


async def test_a_record_with_an_unknown_field_is_refused_and_stays_as_it_is(desk: Bench) -> None:
    """SER-24: as a later release of the same version may write it."""
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    await desk.commit(claim, called(claim))
    key = f"{desk.opened.keys.run(run_id)}:log"
    stored = await desk.opened.connection.execute("HGET", key, 0)
    newer = repacked(stored, field_of_a_later_release="kept")
    await desk.opened.connection.execute("HSET", key, 0, newer)
    refusal = await desk.refused(run_id, step=1)
    assert refusal.why is Refused.UNREADABLE
    assert "field_of_a_later_release" in refusal.detail
    assert await desk.opened.connection.execute("HGET", key, 0) == newer
    assert (await desk.header(run_id))["token"] == ""
    assert await desk.due(run_id) is not None


async def test_a_newer_run_is_tried_at_growing_intervals_of_a_rollouts_length(desk: Bench) -> None:
    """SER-24, DIST-14: the last of the old workers do not put it off for minutes."""
    run_id = await desk.create()
    await become(desk, run_id, NEWER)
    waits = []
    for _ in range(6):
        assert (await desk.refused(run_id)).why is Refused.UNREADABLE
        wait = await wait_of(desk, run_id)
        waits.append(round((wait["deadline"] - wait["since"]) / 1000))
        await let_pass(desk, run_id)
    assert waits == [60, 120, 240, 480, 480, 480]


async def test_a_run_tells_which_worker_could_not_read_it(desk: Bench) -> None:
    """OPS-04: to a client of the newer version, until a worker has it."""
    run_id = await desk.create()
    await become(desk, run_id, NEWER)
    await desk.refused(run_id)
    await become(desk, run_id, OURS)
    wait = load_wait(await desk.header(run_id))
    told = next_attempt(wait, (), await desk.runs.now())
    assert told.startswith("a worker that can read it, tried at ")
    assert f"(stepfleet {own_build()}: the run's records have version {NEWER};" in told
    await let_pass(desk, run_id)
    await desk.claim(run_id)
    assert load_wait(await desk.header(run_id)) is None


async def test_a_newer_run_can_be_cancelled_though_it_cannot_be_read(
    desk: Bench, redis_url: str
) -> None:
    """SER-24: reading it says what to do."""
    run_id = await desk.create()
    await become(desk, run_id, NEWER)
    async with AsyncFleet(redis_url) as fleet:
        with pytest.raises(SerializationError, match="upgrade this worker or client"):
            await fleet.runs.show(run_id)
        assert (await fleet.runs.cancel(run_id)).outcome == "cancelled"
    assert (await desk.header(run_id))["status"] == "cancelled"
