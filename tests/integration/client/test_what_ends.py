"""What would grow without end does not: manifests of batches whose runs are gone, the ledger."""

from functools import partial

import pytest
from support.deadlines import until
from support.runs.stored_runs import Bench, bench, failed, plain_agent
from support.runs.waits import let_pass

from stepfleet.orchestrator import AsyncFleet
from stepfleet.orchestrator.protocol.claim import Claim, Work
from stepfleet.orchestrator.store import keys

AGENT = plain_agent()
WEEK_AND_MORE = 8 * 24 * 3600 * 1000


async def a_batch(fleet: AsyncFleet, name: str) -> str:
    return (await fleet.submit_batch([{"id": name, "input": name}], agent=AGENT)).id


@pytest.mark.parametrize("others", [0, 7])
async def test_manifests_of_batches_whose_runs_are_gone_go_with_further_batches(
    redis_url: str, others: int
) -> None:
    """DIST-13: as Redis expires counters and runs, so the rest; a batch with runs stays."""
    async with AsyncFleet(redis_url) as fleet, bench(redis_url) as desk:
        run = desk.opened.connection.execute
        active = [await a_batch(fleet, f"active {n}") for n in range(others)]
        gone = [await a_batch(fleet, f"gone {n}") for n in range(3)]
        for batch_id in (*active, *gone):
            created = float(await run("ZSCORE", keys.BATCHES, batch_id)) - WEEK_AND_MORE
            await run("ZADD", keys.BATCHES, "XX", created, batch_id)
            await run("HSET", desk.opened.keys.manifest(batch_id), "created", round(created))
        for batch_id in gone:
            for shard in range(desk.opened.keys.shards):
                await run("DEL", desk.opened.keys.batch(shard, batch_id))
        for number in range(60):
            await a_batch(fleet, f"new {number}")
        left = set(await run("ZRANGE", keys.BATCHES, 0, -1))
        assert left.isdisjoint(gone)
        assert left.issuperset(active)
        assert not any([await run("EXISTS", desk.opened.keys.manifest(one)) for one in gone])


async def test_a_ledger_keeps_the_newest_of_refusals_without_end(redis_url: str) -> None:
    """A model that refuses for days costs time and no memory."""
    async with bench(redis_url, grace=0.1) as desk:
        run_id = await desk.create()
        ledger = f"{desk.opened.keys.run(run_id)}:lost"
        entry = '{"kind":"deferred","step":1,"seconds":0.1,"ambiguous":false}'
        many = [text for n in range(1000) for text in (f"old{n}", entry)]
        await desk.opened.connection.execute("HSET", ledger, *many)
        for number in range(3):
            claim = await until(partial(taken, desk, run_id), within=30)
            assert claim is not None
            refused = failed(claim, limited=True, transient=True)
            await desk.commit(claim, refused)
            await let_pass(desk, run_id)
            assert int(await desk.opened.connection.execute("HLEN", ledger)) == 1001, number
        assert len((await desk.stored(run_id)).lost) == 1001
        assert (await desk.counters())["lost"] == 1


async def taken(desk: Bench, run_id: str) -> Claim | None:
    claim = await desk.steps.claim(Work(run_id, 0), desk.token())
    return claim if isinstance(claim, Claim) else None
