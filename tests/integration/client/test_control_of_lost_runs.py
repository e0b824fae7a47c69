"""Requests to runs whose worker has died, while no other worker is up: nobody is waited for."""

from support.runs.lapsed_leases import leases_run_out
from support.runs.stored_runs import Bench, answered

from stepfleet.orchestrator import AsyncFleet, Lifecycle
from stepfleet.orchestrator.protocol.claim import Refused


async def test_a_cancel_does_not_wait_for_a_worker_whose_lease_ran_out(
    redis_url: str, fleet: AsyncFleet, desk: Bench
) -> None:
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    assert (await fleet.runs.cancel(run_id)).outcome == "requested"
    leases_run_out(redis_url)
    assert (await fleet.runs.cancel(run_id)).outcome == "cancelled"
    result = await fleet.runs.result(run_id)
    assert result.lifecycle is Lifecycle.CANCELLED
    assert [(lost.kind, lost.ambiguous) for lost in result.lost_attempts] == [("crash", True)]
    assert not (await desk.commit(claim, answered(claim))).applied
    counted = await desk.counters()
    assert (counted["status:cancelled"], counted.get("open", 0), counted["lost"]) == (1, 0, 1)


async def test_an_answer_that_a_lost_worker_had_paid_for_is_listed_by_the_cancel(
    redis_url: str, fleet: AsyncFleet, desk: Bench
) -> None:
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    response = answered(claim).response
    await desk.steps.journal(claim, 0.5, response=response)
    leases_run_out(redis_url)
    await fleet.runs.cancel(run_id)
    lost = (await fleet.runs.result(run_id)).lost_attempts
    assert sorted((one.kind, one.ambiguous) for one in lost) == [
        ("crash", False),
        ("interrupted", True),
    ]
    await fleet.runs.retry(run_id)
    again = await desk.claim(run_id)
    assert again.journal.response == response
    kinds = [one.kind for one in (await fleet.runs.result(run_id)).lost_attempts]
    assert kinds == ["crash"], "the answer is used after all"


async def test_a_pause_does_not_wait_for_a_worker_whose_lease_ran_out(
    redis_url: str, fleet: AsyncFleet, desk: Bench
) -> None:
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    leases_run_out(redis_url)
    assert (await fleet.runs.pause(run_id)).outcome == "paused"
    assert (await desk.refused(run_id)).why is Refused.PAUSED
    assert not (await desk.commit(claim, answered(claim))).applied
    assert (await fleet.runs.resume(run_id)).outcome == "resumed"
    again = await desk.claim(run_id)
    assert again.crashes == 0, "whoever writes late has not died"
    assert (await desk.commit(again, answered(again))).status == "completed"


async def test_a_pause_takes_no_cancel_back(redis_url: str, fleet: AsyncFleet, desk: Bench) -> None:
    run_id = await desk.create()
    await desk.claim(run_id)
    await fleet.runs.cancel(run_id)
    leases_run_out(redis_url)
    assert (await fleet.runs.pause(run_id)).outcome == "requested"
    claim = await desk.claim(run_id)
    assert claim.state.stop_requested
