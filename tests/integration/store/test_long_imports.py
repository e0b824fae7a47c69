"""Runs that begin with a long log: it comes in pages, and the run is there whole, or not at all."""

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import pytest
from redis.asyncio import Redis
from support.runs.long_runs import AGENT, STEPS, long_run, said
from support.runs.stored_runs import Bench, bench

from stepfleet.orchestrator import AsyncFleet, StoreError
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store import lua
from stepfleet.orchestrator.store.lua import run_script
from stepfleet.orchestrator.store.runs import submission

Meanwhile = Callable[[str], Awaitable[None]]


def beside(monkeypatch: pytest.MonkeyPatch, before: Meanwhile) -> list[str]:
    """Have `before` run in front of each script of an import; return those that ran."""
    ran: list[str] = []

    async def run(connection: Connection, name: str, *args: Any) -> Any:
        if name in ("stage", "adopt"):
            await before(name)
            ran.append(name)
        return await run_script(connection, name, *args)

    monkeypatch.setattr(lua, "run_script", run)
    return ran


async def keys_of(url: str, run_id: str) -> list[str]:
    async with Redis.from_url(url, decode_responses=True) as client:
        found: list[Any] = await client.keys(f"*{run_id}*")
    return sorted(str(key).rpartition(run_id)[2] for key in found)


async def forked(desk: Bench, fleet: AsyncFleet, new: str) -> None:
    """Fork a long run to the id `new`."""
    await desk.opened.configs.announce(AGENT.config)
    assert await fleet.history.fork(await long_run(desk), new_run_id=new) == new


async def test_a_fork_of_a_long_run_is_staged_and_published_whole(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the last call there is no run; then all of it stays, and nothing else is left."""
    async with bench(redis_url, AGENT, lease=600.0) as desk, AsyncFleet(redis_url) as fleet:
        new = str(uuid4())

        async def nothing_yet(name: str) -> None:
            assert "" not in await keys_of(redis_url, new), name

        ran = beside(monkeypatch, nothing_yet)
        await forked(desk, fleet, new)
        assert ran.count("stage") >= 2
        assert ran.count("adopt") == 1
        assert await keys_of(redis_url, new) == ["", ":events", ":log"]
        key = desk.opened.keys.run(new)
        assert await desk.opened.connection.execute("PTTL", f"{key}:log") == -1
        claim = await desk.claim(new, STEPS)
        assert said(claim) == list(range(STEPS))


async def test_what_a_dead_client_has_staged_expires(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(redis_url, AGENT, lease=600.0) as desk, AsyncFleet(redis_url) as fleet:
        new = str(uuid4())

        async def dies(name: str) -> None:
            if name == "adopt":
                raise StoreError(name)

        beside(monkeypatch, dies)
        with pytest.raises(StoreError):
            await forked(desk, fleet, new)
        (staged,) = await keys_of(redis_url, new)
        key = desk.opened.keys.run(new)
        left = await desk.opened.connection.execute("PTTL", key + staged)
        assert 0 < left <= submission.STAGED_SECONDS * 1000


async def test_pages_that_are_gone_are_staged_again(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that lost its newest writes, or a client that stalled: never half a log."""
    async with bench(redis_url, AGENT, lease=600.0) as desk, AsyncFleet(redis_url) as fleet:
        new = str(uuid4())
        lost: list[str] = []

        async def lose_once(name: str) -> None:
            if name == "adopt" and not lost:
                key = desk.opened.keys.run(new)
                (staged,) = lost[:] = await keys_of(redis_url, new)
                await desk.opened.connection.execute("HDEL", key + staged, "7")

        ran = beside(monkeypatch, lose_once)
        await forked(desk, fleet, new)
        assert ran.count("adopt") == 2
        assert said(await desk.claim(new, STEPS)) == list(range(STEPS))


async def test_a_repetition_changes_nothing_and_leaves_nothing(redis_url: str) -> None:
    """The reply was lost: the run that is there meanwhile has gone on, and stays as it is."""
    async with bench(redis_url, AGENT, lease=600.0) as desk, AsyncFleet(redis_url) as fleet:
        await desk.opened.configs.announce(AGENT.config)
        run_id, new = await long_run(desk), str(uuid4())
        kept = await fleet.history.checkpoint(run_id)
        assert await fleet.history.restore(kept, run_id=new) == new
        before = await desk.header(new)
        assert await fleet.history.restore(kept, run_id=new) == new
        assert await desk.header(new) == before
        assert await keys_of(redis_url, new) == ["", ":events", ":log"]
