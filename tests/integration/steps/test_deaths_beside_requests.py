"""Deaths that were counted, and cancels of runs that nobody holds, beside other requests."""

from typing import Any

import pytest
from support.runs.lapsed_leases import leases_run_out
from support.runs.stored_runs import Bench, answered, called, plain_agent, with_settings

from stepfleet.orchestrator import AsyncFleet
from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.store.batches.batches import run_id_of
from stepfleet.worker.runtime.rescuer import Rescuer

AGENT = plain_agent()


BENCH: dict[str, Any] = {"agent": AGENT, "lease": 600, "shards": 1}


async def test_an_owner_whose_death_was_counted_is_not_answered_that_its_commit_was_applied(
    desk: Bench,
) -> None:
    """It lives after all: its answer is listed with its cost, and its token claims nothing."""
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    assert await desk.marks.child_died(Work(run_id, 0), "test")
    assert not (await desk.commit(claim, answered(claim))).applied
    (lost,) = (await desk.stored(run_id)).result().lost_attempts
    assert (lost.kind, lost.cost_usd) == ("late", 0.25)
    refused = await desk.steps.claim(Work(run_id, 0), claim.token)
    assert refused.why == "stale"  # type: ignore[union-attr]
    again = await desk.claim(run_id)
    assert (await desk.commit(again, answered(again))).applied


async def test_a_commit_that_was_applied_is_known_again_behind_a_death(desk: Bench) -> None:
    run_id = await desk.create()
    first = await desk.claim(run_id)
    assert (await desk.commit(first, called(first))).applied
    await desk.claim(run_id, 1)
    assert await desk.marks.child_died(Work(run_id, 1), "test")
    assert (await desk.commit(first, called(first))).applied


async def test_a_run_that_cannot_be_read_ends_with_a_cancel_that_comes_meanwhile(
    desk: Bench, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, keys = desk.opened.connection, desk.opened.keys
    async with AsyncFleet(redis_url) as fleet:
        batch = await fleet.submit_batch([{"input": "one"}], AGENT)
    run_id = run_id_of(batch.id, 0)
    await connection.execute("HSET", keys.run(run_id), "v", 9)
    store = with_settings(desk.opened, retention=3600, grace=5)
    batches, requests = store.batches, store.requests
    give_back = desk.steps._give_back

    async def cancelled_meanwhile(*given: Any) -> None:
        monkeypatch.undo()
        fields = desk.control.batch_cancel("enough")
        await requests.ask(await batches.get(batch.id), "cancel", "once", fields)
        await give_back(*given)

    monkeypatch.setattr(desk.steps, "_give_back", cancelled_meanwhile)
    assert (await desk.refused(run_id)).why == "unreadable"
    header = await desk.header(run_id)
    assert (header["status"], header["token"]) == ("cancelled", "")


async def test_a_cancelled_run_of_a_dead_worker_ends_while_the_fleet_is_paused(
    desk: Bench, redis_url: str
) -> None:
    opened = desk.opened
    others = [await desk.create() for _ in range(5)]
    run_id = await desk.create()
    await desk.claim(run_id)
    assert (await desk.control.cancel(await desk.stored(run_id), "enough")).outcome == "requested"
    await opened.requests.pause_fleet(paused=True)
    leases_run_out(redis_url)
    due = {one: await desk.due(one) for one in others}
    await opened.connection.execute("DEL", opened.settings.queue)
    rescuer = Rescuer(
        opened.connection,
        opened.keys,
        opened.dispatch,
        grace=5,
        interval=2,
        long_queue=100,
        jitter=lambda: 0.5,
    )
    assert await rescuer.rescue() == 1
    assert {one: await desk.due(one) for one in others} == due
    for one in others:
        assert (await desk.refused(one)).why == "paused"
    claim = await desk.claim(run_id)
    assert claim.state.stop_requested == "enough"
    assert await rescuer.rescue() == 0


async def test_a_cancelled_run_is_found_behind_many_that_wait_for_the_fleet(
    desk: Bench, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepfleet.worker.runtime.rescuer.MOST_PER_SHARD", 2)
    opened = desk.opened
    runs = [await desk.create() for _ in range(7)]
    await desk.claim(runs[-1])
    await desk.control.cancel(await desk.stored(runs[-1]), "enough")
    await opened.requests.pause_fleet(paused=True)
    leases_run_out(redis_url)
    due = opened.keys.due(0)
    for place, run_id in enumerate(runs):
        await opened.connection.execute("ZADD", due, place + 1, run_id)
    rescuer = Rescuer(
        opened.connection,
        opened.keys,
        opened.dispatch,
        grace=5,
        interval=2,
        long_queue=100,
        jitter=lambda: 0.5,
    )
    assert [await rescuer.rescue() for _ in range(5)] == [0, 0, 0, 1, 0]
