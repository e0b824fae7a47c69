"""Cancel, pause and resume of whole batches and of the fleet: in force before any run was swept."""

import logging
from typing import Any

import pytest
from support.runs.batch_requests import in_force, requests_of
from support.runs.lapsed_leases import leases_run_out
from support.runs.stored_runs import Bench, answered, called, failed, plain_agent

from stepfleet.orchestrator import AsyncFleet, ConfigurationError
from stepfleet.orchestrator.client.fleet import AsyncBatch
from stepfleet.orchestrator.protocol.claim import Refused
from stepfleet.orchestrator.store.batches.batches import run_id_of
from stepfleet.worker.runtime.rescuer import Rescuer

AGENT = plain_agent()
LINES = [{"id": f"q{n}", "input": f"question {n}"} for n in range(8)]


BENCH: dict[str, Any] = {"agent": AGENT}


@pytest.fixture
async def batch(fleet: AsyncFleet) -> AsyncBatch:
    return await fleet.submit_batch(LINES, AGENT)


async def recounted(desk: Bench, batch: AsyncBatch) -> None:
    """Compare the counters with the runs' own records."""
    counted = await desk.counters(batch.id)
    found: dict[str, int] = {}
    for row in range(len(LINES)):
        status = f"status:{(await desk.header(run_id_of(batch.id, row)))['status']}"
        found[status] = found.get(status, 0) + 1
    assert {name: n for name, n in counted.items() if name.startswith("status:")} == found


async def test_a_cancel_holds_before_any_run_was_swept(desk: Bench, batch: AsyncBatch) -> None:
    held = await desk.claim(run_id_of(batch.id, 0))
    request = await in_force(desk, batch, "cancel")
    refusal = await desk.refused(run_id_of(batch.id, 1))
    assert (refusal.why, refusal.detail) == (Refused.ENDED, "cancelled")
    assert (await desk.steps.journal(held, 1.0)).want == "cancel"
    assert (await desk.commit(held, called(held))).wanted == "cancel"
    await recounted(desk, batch)
    swept = await requests_of(desk).sweep(request)
    assert (swept.runs, swept.held) == (7, 1)
    await recounted(desk, batch)
    assert (await desk.counters(batch.id))["status:cancelled"] == 7


async def test_a_pause_holds_before_any_run_was_swept(desk: Bench, batch: AsyncBatch) -> None:
    held = await desk.claim(run_id_of(batch.id, 0))
    request = await in_force(desk, batch, "pause")
    assert (await desk.refused(run_id_of(batch.id, 1))).why is Refused.PAUSED
    assert (await desk.commit(held, called(held))).status == "paused"
    await recounted(desk, batch)
    await requests_of(desk).sweep(request)
    assert (await desk.counters(batch.id))["status:paused"] == 8
    await recounted(desk, batch)
    assert await batch.resume() == 8
    await desk.claim(run_id_of(batch.id, 0), 1)
    await desk.claim(run_id_of(batch.id, 1))
    await recounted(desk, batch)


async def test_pauses_and_resumes_leave_one_message_for_each_run(
    desk: Bench, batch: AsyncBatch
) -> None:
    before = await desk.queued()
    for _ in range(3):
        assert await batch.pause() == 8
        assert await batch.resume() == 8
    assert await desk.queued() == before == 8


@pytest.mark.parametrize("is_swept", [False, True])
async def test_a_resume_sends_anew_what_a_worker_took_from_the_queue_meanwhile(
    desk: Bench, batch: AsyncBatch, *, is_swept: bool
) -> None:
    taken = run_id_of(batch.id, 3)
    request = await in_force(desk, batch, "pause")
    if is_swept:
        await requests_of(desk).sweep(request)
    assert (await desk.refused(taken)).why is Refused.PAUSED
    await requests_of(desk).sweep(request)
    before = await desk.queued()
    assert await batch.resume() == 8
    assert await desk.queued() == before + 1
    await desk.claim(taken)


async def test_a_resume_sends_what_is_not_in_the_queue(
    fleet: AsyncFleet, desk: Bench, batch: AsyncBatch, redis_url: str
) -> None:
    """Of a run that waits for its time, or whose worker was lost, and of one that is retried."""
    later, lost, again = (run_id_of(batch.id, row) for row in range(3))
    claim = await desk.claim(later)
    await desk.commit(claim, failed(claim, transient=True))
    await desk.claim(lost)
    leases_run_out(redis_url)
    assert (await fleet.runs.pause(again)).outcome == "paused"
    assert (await fleet.runs.cancel(again)).outcome == "cancelled"
    assert (await fleet.runs.retry(again)).outcome == "retried"
    claim = await desk.claim(again)
    assert (await fleet.runs.pause(again)).outcome == "requested"
    await desk.commit(claim, called(claim))
    assert await batch.pause() == 7
    for run_id in (later, lost, again):
        before = await desk.queued()
        assert (await fleet.runs.resume(run_id)).outcome == "resumed"
        assert await desk.queued() == before + 1


async def test_a_request_to_a_run_comes_behind_that_to_its_batch(
    fleet: AsyncFleet, desk: Bench, batch: AsyncBatch
) -> None:
    own = run_id_of(batch.id, 3)
    request = await in_force(desk, batch, "pause")
    assert (await fleet.runs.resume(own)).outcome == "active"
    await requests_of(desk).sweep(request)
    claim = await desk.claim(own)
    await desk.commit(claim, failed(claim))
    await batch.cancel()
    assert (await fleet.runs.retry(own)).outcome == "retried"
    again = await desk.claim(own)
    assert (await desk.commit(again, answered(again))).status == "completed"


async def test_a_lapsed_lease_is_nobodys_for_a_batch_too(
    redis_url: str, desk: Bench, batch: AsyncBatch
) -> None:
    await desk.claim(run_id_of(batch.id, 0))
    leases_run_out(redis_url)
    assert await batch.cancel() == 8
    assert (await batch.progress()).cancelled == 8
    assert (await batch.progress()).lost == 1


async def test_a_worker_finishes_what_a_client_began(desk: Bench, batch: AsyncBatch) -> None:
    await in_force(desk, batch, "cancel")
    connection = desk.opened.connection
    assert await requests_of(desk).go_on() == 0, "its client may be at it"
    await connection.execute("ZADD", "sf:sweeps", 1, batch.id)
    assert await requests_of(desk).go_on() == 1
    assert (await batch.progress()).cancelled == 8
    assert await requests_of(desk).go_on() == 0


async def test_a_repeated_request_is_the_same_one(desk: Bench, batch: AsyncBatch) -> None:
    first = await in_force(desk, batch, "pause", "once")
    assert await in_force(desk, batch, "pause", "once") == first
    assert (await in_force(desk, batch, "pause", "twice")).number > first.number


async def test_a_newer_request_ends_an_older_sweep(desk: Bench, batch: AsyncBatch) -> None:
    older = await in_force(desk, batch, "pause", "one")
    assert await batch.resume() == 0
    assert (await requests_of(desk).sweep(older)).runs == 0
    assert (await batch.progress()).queued == 8


async def test_a_cancel_reaches_all_before_anything_else_is_asked(
    desk: Bench, batch: AsyncBatch
) -> None:
    await in_force(desk, batch, "cancel")
    assert await batch.resume() == 0
    assert (await batch.progress()).cancelled == 8


async def test_paused_runs_are_not_dispatched(desk: Bench, batch: AsyncBatch) -> None:
    opened = desk.opened
    rescuer = Rescuer(
        opened.connection,
        opened.keys,
        opened.dispatch,
        grace=5,
        interval=1,
        long_queue=1000,
        jitter=lambda: 0.5,
    )
    for shard in range(opened.keys.shards):
        for run_id in await opened.connection.execute("ZRANGE", opened.keys.due(shard), 0, -1):
            await opened.connection.execute("ZADD", opened.keys.due(shard), 1, run_id)
    await in_force(desk, batch, "pause")
    assert await rescuer.rescue() == 0
    await batch.resume()
    for shard in range(opened.keys.shards):
        for run_id in await opened.connection.execute("ZRANGE", opened.keys.due(shard), 0, -1):
            await opened.connection.execute("ZADD", opened.keys.due(shard), 1, run_id)
    assert await rescuer.rescue() == 8


async def test_a_paused_fleet_begins_no_step_and_finishes_those_under_way(
    fleet: AsyncFleet, desk: Bench, batch: AsyncBatch
) -> None:
    held = await desk.claim(run_id_of(batch.id, 0))
    await fleet.pause()
    assert (await desk.refused(run_id_of(batch.id, 1))).why is Refused.PAUSED
    assert (await desk.commit(held, called(held))).status == "in_progress"
    assert (await desk.refused(run_id_of(batch.id, 0), 1)).why is Refused.PAUSED
    await fleet.resume()
    await desk.claim(run_id_of(batch.id, 0), 1)


async def test_a_cancelled_batch_gets_no_more_runs(
    fleet: AsyncFleet, desk: Bench, batch: AsyncBatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its submitter had died; submitting the same again creates nothing, and says so."""
    connection, keys = desk.opened.connection, desk.opened.keys
    await connection.execute("HDEL", keys.manifest(batch.id), "sealed")
    lost = [run_id_of(batch.id, row) for row in (6, 7)]
    for run_id in lost:
        await _never_created(desk, run_id, batch.id)
    await batch.cancel()
    progress = await batch.progress()
    assert (progress.ended, progress.ok, progress.cancelled) == (True, False, 6)
    with caplog.at_level(logging.WARNING):
        again = await fleet.submit_batch(LINES, AGENT)
    assert again.id == batch.id
    assert "was cancelled: nothing more of it is created" in caplog.text
    assert (await desk.counters(batch.id))["total"] == 6
    assert (await again.wait(timeout=60)).cancelled == 6


async def test_a_submission_that_is_under_way_ends_with_the_cancel(
    desk: Bench, batch: AsyncBatch
) -> None:
    await batch.cancel()
    with pytest.raises(ConfigurationError, match="was cancelled"):
        await desk.create(batch=batch.id)


async def test_a_batch_whose_submitter_is_gone_can_be_waited_for(
    fleet: AsyncFleet, desk: Bench, batch: AsyncBatch
) -> None:
    connection, stored = desk.opened.connection, desk.opened.keys.manifest(batch.id)
    await connection.execute("HDEL", stored, "sealed")
    await _never_created(desk, run_id_of(batch.id, 7), batch.id)
    batch = await fleet.batches.get(batch.id)
    assert not (await batch.progress()).submission_stalled, "it may be at work"
    await connection.execute("HSET", stored, "submitting", 1)
    for row in range(7):
        claim = await desk.claim(run_id_of(batch.id, row))
        await desk.commit(claim, answered(claim))
    progress = await batch.wait(timeout=60)
    assert progress.submission_stalled
    assert (progress.submitted, progress.total, progress.ended, progress.ok) == (7, 8, False, False)
    assert len([one async for one in batch.results()]) == 7
    again = await fleet.submit_batch(LINES, AGENT)
    assert (await again.progress()).sealed
    assert (await again.progress()).queued == 1


async def _never_created(desk: Bench, run_id: str, batch_id: str) -> None:
    """Take a queued run away as if its submitter had not come to it."""
    connection, keys = desk.opened.connection, desk.opened.keys
    shard = keys.shard_of(run_id)
    await connection.execute("DEL", *(keys.run(run_id) + part for part in ("", ":log", ":events")))
    await connection.execute("ZREM", keys.due(shard), run_id)
    for field in ("total", "open", "status:queued"):
        await connection.execute("HINCRBY", keys.batch(shard, batch_id), field, -1)
