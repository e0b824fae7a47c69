"""How long the results of a batch stay: from the end of its last run, and as a whole."""

from typing import Any

import pytest
from support.runs.stored_runs import Bench, answered, failed, plain_agent, with_settings

from stepfleet.orchestrator import AsyncFleet
from stepfleet.orchestrator.client.fleet import AsyncBatch
from stepfleet.orchestrator.store import pace
from stepfleet.orchestrator.store.batches.batches import run_id_of
from stepfleet.orchestrator.store.lua import run_script

AGENT = plain_agent()
RUNS = 500  # more than one page on a shard


BENCH: dict[str, Any] = {"agent": AGENT, "shards": 1}


async def submitted(fleet: AsyncFleet, count: int) -> AsyncBatch:
    return await fleet.submit_batch([{"input": f"question {n}"} for n in range(count)], AGENT)


async def complete(desk: Bench, batch: AsyncBatch, row: int) -> None:
    claim = await desk.claim(run_id_of(batch.id, row))
    await desk.commit(claim, answered(claim))


async def left(desk: Bench, batch: AsyncBatch, row: int) -> int:
    key = desk.opened.keys.run(run_id_of(batch.id, row))
    return int(await desk.opened.connection.execute("TTL", key))


async def past_retention(desk: Bench) -> None:
    """Let everything that is to expire be gone, as if the time had passed."""
    connection = desk.opened.connection
    for key in await connection.execute("KEYS", "sf:{s*"):
        if await connection.execute("PTTL", key) > 0:
            await connection.execute("DEL", key)


async def test_results_of_an_unfinished_batch_stay_however_old_they_are(
    desk: Bench, fleet: AsyncFleet
) -> None:
    batch = await submitted(fleet, 3)
    await complete(desk, batch, 0)
    await desk.keep_up()
    assert await left(desk, batch, 0) == -1
    for row in (1, 2):
        await complete(desk, batch, row)
    await desk.keep_up()
    assert {await left(desk, batch, row) > 0 for row in range(3)} == {True}


async def test_all_runs_of_a_batch_are_reached_page_by_page(desk: Bench, fleet: AsyncFleet) -> None:
    batch = await submitted(fleet, RUNS)
    await batch.cancel()
    await desk.keep_up()
    assert min([await left(desk, batch, row) for row in range(RUNS)]) > 0


async def test_a_batch_that_begins_anew_keeps_all_its_results(
    desk: Bench, fleet: AsyncFleet
) -> None:
    batch = await submitted(fleet, 2)
    await complete(desk, batch, 0)
    claim = await desk.claim(run_id_of(batch.id, 1))
    await desk.commit(claim, failed(claim))
    await desk.keep_up()
    assert await left(desk, batch, 0) > 0
    assert await batch.retry() == 1
    await desk.keep_up()
    assert await left(desk, batch, 0) == -1
    await complete(desk, batch, 1)
    await desk.keep_up()
    assert await left(desk, batch, 0) > 0


async def test_what_is_past_retention_is_said_and_no_number_shrinks(
    desk: Bench, fleet: AsyncFleet
) -> None:
    batch = await submitted(fleet, 4)
    for row in range(4):
        await complete(desk, batch, row)
    before = await batch.progress()
    assert before.ok
    await desk.keep_up()
    await past_retention(desk)
    after = await (await fleet.batches.get(batch.id)).progress()
    assert after.past_retention == 4
    assert (after.done, after.cost_usd, after.steps) == (4, before.cost_usd, before.steps)
    assert after.ended
    assert not after.ok
    assert [one.batch_id for one in await fleet.batches.newest()] == [batch.id]


async def test_one_worker_of_a_fleet_looks_after_batches(desk: Bench, fleet: AsyncFleet) -> None:
    batch = await submitted(fleet, 1)
    await complete(desk, batch, 0)
    opened = desk.opened
    looks = [await with_settings(opened, retention=60).upkeep.look() for _ in range(3)]
    assert looks == [1, 0, 0]


async def test_a_run_that_ends_anew_between_two_pages_leaves_nothing_without_end(
    desk: Bench, fleet: AsyncFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "FIRST", 2)
    monkeypatch.setattr(pace, "MOST", 2)
    connection, keys = desk.opened.connection, desk.opened.keys
    batch = await submitted(fleet, 5)
    for row in range(5):
        claim = await desk.claim(run_id_of(batch.id, row))
        await desk.commit(claim, failed(claim))
    first = run_id_of(batch.id, 0)
    pages = 0

    send = pace.SweepPace.send

    async def retried_behind_the_first_page(*given: Any) -> Any:
        nonlocal pages
        answer, pages = await send(*given), pages + 1
        if pages == 1:
            assert (await fleet.runs.retry(first)).outcome == "retried"
            claim = await desk.claim(first)
            await desk.commit(claim, answered(claim))
        return answer

    monkeypatch.setattr(pace.SweepPace, "send", retried_behind_the_first_page)
    await desk.keep_up()
    assert await connection.execute("PTTL", keys.batch(0, batch.id)) > 0
    assert await connection.execute("ZSCORE", keys.over(0), batch.id) is not None
    await desk.keep_up()
    assert await connection.execute("ZSCORE", keys.over(0), batch.id) is None
    assert min([await left(desk, batch, row) for row in range(5)]) > 0
    await past_retention(desk)
    assert not await connection.execute("KEYS", f"*batch:{batch.id}*")


async def test_counters_of_a_run_that_was_taken_up_before_the_first_page_stay(
    desk: Bench, fleet: AsyncFleet
) -> None:
    connection, keys = desk.opened.connection, desk.opened.keys
    batch = await submitted(fleet, 1)
    claim = await desk.claim(run_id_of(batch.id, 0))
    await desk.commit(claim, failed(claim))
    score = await connection.execute("ZSCORE", keys.over(0), batch.id)
    assert (await fleet.runs.retry(run_id_of(batch.id, 0))).outcome == "retried"
    till = 10**13
    await run_script(connection, "expire", [keys.due(0)], batch.id, till, "0", 200, score)
    assert await connection.execute("PTTL", keys.batch(0, batch.id)) == -1
    assert await connection.execute("ZSCORE", keys.over(0), batch.id) is not None


async def test_a_batch_that_older_workers_have_not_entered_is_looked_at(
    desk: Bench, fleet: AsyncFleet
) -> None:
    """An older one may end the last run of a shard: it enters the batch nowhere."""
    connection, keys = desk.opened.connection, desk.opened.keys
    batch = await submitted(fleet, 2)
    await connection.execute("ZREM", keys.over(0), batch.id)
    await complete(desk, batch, 0)
    score = await connection.execute("ZSCORE", keys.over(0), batch.id)
    assert score is not None
    await complete(desk, batch, 1)
    await connection.execute("ZADD", keys.over(0), score, batch.id)
    await connection.execute("EXPIRE", keys.batch(0, batch.id), 60)
    await desk.keep_up()
    assert {await left(desk, batch, row) > 0 for row in range(2)} == {True}
