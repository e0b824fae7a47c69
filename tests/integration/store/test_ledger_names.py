"""What the ledger has of a name: a new one is known at once, an old one found without the rest."""

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from support.runs.stored_runs import Bench, answered, bench, plain_agent
from support.servers.redis_servers import RedisServer

from stepfleet.orchestrator.records.ledger import LedgerRow
from stepfleet.orchestrator.store.ledger import EPOCH, Ledger
from stepfleet.worker.runtime.admission.gate import Baselines

DAYS = 90
NAMES = ["tenant:acme", 'tenant:a/c"m*e', "agent:plain", "batch:b1", "tenant:new", "batch:new"]


@pytest.fixture
async def desk(redis_url: str) -> AsyncIterator[Bench]:
    async with bench(redis_url, plain_agent()) as opened:
        yield opened


def ledger_of(desk: Bench) -> Ledger:
    return desk.opened.ledger


async def spend(desk: Bench, runs: int, tenant: str, batch: str = "b1") -> None:
    for _ in range(runs):
        run_id = await desk.create(batch, tenant=tenant)
        claim = await desk.claim(run_id)
        await desk.commit(claim, answered(claim))


async def sums(ledger: Ledger, names: list[str]) -> dict[str, int]:
    """Return the calls of names by their rows."""
    found = dict.fromkeys(names, 0)
    async for of, row in ledger.rows_of(names, DAYS):
        for name in of:
            found[name] += row.sums.calls
    return found


async def all_rows(ledger: Ledger) -> list[LedgerRow]:
    today = await ledger.today()
    return [row async for row in ledger.rows(today - timedelta(days=DAYS), today)]


def expected(rows: list[LedgerRow], names: list[str]) -> dict[str, int]:
    found = dict.fromkeys(names, 0)
    for row in rows:
        for name in (f"tenant:{row.tenant}", f"agent:{row.agent}", f"batch:{row.batch}"):
            if name in found:
                found[name] += row.sums.calls
    return found


async def age(desk: Bench, *, with_names: bool) -> None:
    """Move all sums to twenty days ago, as if nothing had been made since."""
    connection, keys = desk.opened.connection, desk.opened.keys
    today = (await ledger_of(desk).today() - EPOCH).days
    for shard in range(keys.shards):
        costs = f"{keys.tag(shard)}costs"
        if await connection.execute("EXISTS", f"{costs}:{today}"):
            await connection.execute("RENAME", f"{costs}:{today}", f"{costs}:{today - 20}")
        if not with_names:
            await connection.execute("DEL", f"{costs}-names")
            continue
        for name in await connection.execute("ZRANGE", f"{costs}-names", 0, -1):
            await connection.execute("ZADD", f"{costs}-names", today - 20, name)


@pytest.mark.parametrize("at", ["in lines", "summed", "old", "of an older release"])
async def test_a_names_rows_are_found_wherever_they_are(desk: Bench, at: str) -> None:
    """Also of a tenant whose name JSON or a pattern would write in another way."""
    few = at == "in lines"
    await spend(desk, 2 if few else 40, "acme")
    await spend(desk, 3 if few else 30, 'a/c"m*e')
    if not few:
        await fold_all(desk)
    if at in ("old", "of an older release"):
        await age(desk, with_names=at == "old")
        await desk.opened.connection.execute("DEL", desk.opened.keys.manifest("b1"))
    await spend(desk, 2, "acme", "b2")
    ledger = ledger_of(desk)
    known = expected(await all_rows(ledger), NAMES)
    assert known["tenant:acme"] >= 4
    assert await sums(ledger, NAMES) == known
    assert (known["tenant:new"], known["batch:new"]) == (0, 0)


async def fold_all(desk: Bench) -> None:
    """Have each shard sum up its lines: further ones come, which count nothing."""
    keys = desk.opened.keys
    for shard in range(keys.shards):
        costs = f"{keys.tag(shard)}costs"
        if await desk.opened.connection.execute("LLEN", costs):
            line = '0 0 0 0 0 0 0 0 0 0 0 0 0\n["lost","","",""]\n'
            await desk.opened.connection.execute("RPUSH", costs, *([line] * 500))
    for _ in range(60):
        await spend(desk, 1, "filler", "filler")


async def test_a_new_name_reads_no_days(desk: Bench, redis_server: RedisServer) -> None:
    """It has spent nothing; a batch has no calls before its first day, whatever the ledger has."""
    connection, keys = desk.opened.connection, desk.opened.keys
    today = (await ledger_of(desk).today() - EPOCH).days
    rows = {f'["committed","t{n}","a","m"]\nb{n}': "1 " + "0 " * 11 for n in range(300)}
    for shard in range(keys.shards):
        costs = f"{keys.tag(shard)}costs"
        await connection.execute("ZADD", f"{costs}-names", today - 50, "*")
        for day in range(today - 49, today + 1):
            pairs = [part for pair in rows.items() for part in pair]
            await connection.execute("HSET", f"{costs}:{day}", *pairs)
    await desk.create("fresh")
    await connection.execute("HSET", keys.manifest("fresh"), "created", today * 86_400_000)
    await connection.execute("CONFIG", "RESETSTAT")
    baselines = Baselines(ledger_of(desk), DAYS)
    reading = baselines.wanted(["tenant:new", "batch:fresh"])
    assert reading is not None
    assert [one["all"] for one in await reading] == [{}, {}]
    stats = await connection.execute("INFO", "commandstats")
    scanned = int(stats["cmdstat_hscan"]["calls"]) if "cmdstat_hscan" in stats else 0
    assert scanned <= keys.shards * 2, "today's rows, at most"
