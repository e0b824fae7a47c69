"""Many waits of one client share their looks; each hears of its own run, and soon."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import orjson
import pytest
from support.deadlines import until

from stepfleet.orchestrator import Agent, AsyncFleet, StoreError
from stepfleet.orchestrator.client.fleet import store_of
from stepfleet.orchestrator.client.watching.watch import POLLED_PER_SECOND
from stepfleet.orchestrator.redis_client.connection import Connection

AGENT = Agent("watched", model="openai:m")
MANY = 165
ROUNDS = 6


@asynccontextmanager
async def waiting_runs(url: str, count: int) -> AsyncIterator[tuple[AsyncFleet, list[str]]]:
    """Yield a client and runs that nobody works on."""
    async with AsyncFleet(url) as fleet:
        yield fleet, [await fleet.submit(AGENT, "hi", delay=3600) for _ in range(count)]


TELL = """
local first = redis.call('HINCRBY', KEYS[1], 'seq', 1)
redis.call('XADD', KEYS[1] .. ':events', '*', 'first', first, 'events', ARGV[1])
"""


async def tell(fleet: AsyncFleet, run_id: str) -> None:
    """Write one event of a run at once with its number, as the scripts do."""
    store = await store_of(fleet)
    event = {"type": "agent.step.started", "session_id": run_id, "execution_id": f"{run_id}:1",
             "parent_agent_id": None, "payload": {"step_number": 1}}  # fmt: skip
    key, told = store.keys.run(run_id), orjson.dumps([event])
    await store.connection.execute("EVAL", TELL, 1, key, told)


async def commands(connection: Connection) -> int:
    text = await connection.execute("INFO", "stats")
    stats = text if isinstance(text, dict) else dict(
        line.split(":", 1) for line in str(text).splitlines() if ":" in line
    )  # fmt: skip
    return int(stats["total_commands_processed"])


async def test_165_followers_of_runs_at_work_ask_as_one(redis_url: str) -> None:
    """STRM-04: what they cost is bounded by looks and by what there is to read."""
    heard = _Heard()
    async with waiting_runs(redis_url, MANY) as (fleet, run_ids):

        async def follow(run_id: str) -> None:
            async for _ in fleet.runs.events(run_id, follow=True):
                heard.count += 1

        followers = [asyncio.create_task(follow(run_id)) for run_id in run_ids]
        await until(partial(heard.at_least, MANY), within=60, what="the first event of each")
        connection = (await store_of(fleet)).connection
        clock = asyncio.get_running_loop().time
        begun, before = clock(), await commands(connection)
        for number in range(1, ROUNDS + 1):
            await asyncio.gather(*(tell(fleet, run_id) for run_id in run_ids))
            most = MANY * (number + 1)
            await until(partial(heard.at_least, most), within=60, what="a round of events")
            await asyncio.sleep(0.4)  # in which followers that look alone look again and again
        asked, seconds = await commands(connection) - before, clock() - begun
        for one in followers:
            one.cancel()
        await asyncio.gather(*followers, return_exceptions=True)
    # An event is written by three commands and read by one; looks have their bound.
    assert asked < MANY * ROUNDS * 5 + POLLED_PER_SECOND * (seconds + 1)


@dataclass
class _Heard:
    """How many events came."""

    count: int = 0

    async def at_least(self, count: int) -> bool:
        return self.count >= count


async def test_each_wait_ends_with_its_own_run(redis_url: str) -> None:
    """However many wait beside it."""
    async with waiting_runs(redis_url, 20) as (fleet, run_ids):
        waits = [asyncio.create_task(fleet.runs.wait(run_id)) for run_id in run_ids]
        for run_id, wait in zip(run_ids, waits, strict=True):
            others = [one for one in waits if one is not wait and not one.done()]
            await fleet.runs.cancel(run_id)
            async with asyncio.timeout(60):
                assert (await wait).run_id == run_id
            assert not any(one.done() for one in others)


async def test_a_wait_that_times_out_leaves_the_others(redis_url: str) -> None:
    async with waiting_runs(redis_url, 2) as (fleet, (first, second)):
        other = asyncio.create_task(fleet.runs.wait(second))
        with pytest.raises(TimeoutError):
            await fleet.runs.wait(first, timeout=0.2)
        await fleet.runs.cancel(second)
        async with asyncio.timeout(60):
            assert (await other).run_id == second


async def test_a_wait_on_a_fleet_that_is_closed_ends_with_an_error(redis_url: str) -> None:
    async with waiting_runs(redis_url, 1) as (fleet, (run_id,)):
        wait = asyncio.create_task(fleet.runs.wait(run_id))
        client = await fleet._session.open()
        await until(lambda: _waited_for(client.watch), within=60, what="the wait")
    with pytest.raises(StoreError, match="closed"):
        async with asyncio.timeout(60):
            await wait


async def _waited_for(watch: object) -> bool:
    return bool(getattr(watch, "_waiters", ()))
