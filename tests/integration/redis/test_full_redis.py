"""A Redis whose memory is full for longer than a lease: what workers hold stays theirs."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from support.deadlines import until
from support.runs.heavy_calls import ONE, render
from support.runs.opened_runs import lease_runs_out, opened_run
from support.runs.stored_runs import Bench, bench, called, with_settings
from support.servers.redis_servers import RedisServer

from stepfleet.orchestrator import StoreError
from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.protocol.waiting import TakenCall
from stepfleet.orchestrator.store import lua
from stepfleet.orchestrator.store.runs.steps import StepStore
from stepfleet.worker.runtime.rescuer import Rescuer

Servers = Callable[..., RedisServer]


@pytest.fixture
def server(own_redis: Servers) -> RedisServer:
    return own_redis()


@pytest.fixture
async def desk(server: RedisServer) -> AsyncIterator[Bench]:
    async with bench(server.url, lease=600.0, grace=60) as opened:
        yield opened


async def fill(desk: Bench, *, full: bool = True) -> None:
    """Have Redis refuse what needs memory, or not any more."""
    await desk.opened.connection.execute("CONFIG", "SET", "maxmemory", 1 if full else 0)


def rescuer_of(desk: Bench) -> Rescuer:
    opened = desk.opened
    return Rescuer(
        *(opened.connection, opened.keys, opened.dispatch),
        grace=60.0,
        interval=0.05,
        long_queue=100,
        jitter=lambda: 0.5,
    )


def renewing(desk: Bench, lease: float) -> StepStore:
    return with_settings(desk.opened, lease=lease, grace=60.0, retention=600).steps


async def test_a_lease_is_renewed_while_redis_is_full(desk: Bench) -> None:
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    await fill(desk)
    before = await desk.header(run_id)
    held = await renewing(desk, 1200.0).journal(claim, 5.0)
    assert held.ours
    after = await desk.header(run_id)
    assert int(after["lease"]) > int(before["lease"])
    assert await desk.due(run_id) == float(after["lease"])
    await fill(desk, full=False)
    assert (await desk.commit(claim, called(claim))).applied


async def test_the_lease_of_a_tool_call_is_renewed_while_redis_is_full(server: RedisServer) -> None:
    async with opened_run(server.url, *ONE, tools=(render,)) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        hint = Work(run_id, 0, 0)
        assert isinstance(await desk.steps.calls.take(hint, "c"), TakenCall)
        await fill(desk)
        assert (await desk.steps.calls.keep(hint, "c", 1.0)).ours


async def test_servers_that_know_no_flags_renew_as_they_did(
    desk: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis 6 takes the line of flags for Lua, which it is not."""
    monkeypatch.setattr(lua, "_ALLOWED", "#\n")
    monkeypatch.setattr(lua, "digest", lua.digest.__wrapped__)
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    for _ in range(2):
        assert (await desk.steps.journal(claim, 1.0)).ours
    assert not desk.opened.connection.takes_flags


async def test_nobody_is_rescued_before_those_who_live_have_renewed(desk: Bench) -> None:
    """Neither while Redis is full, nor with the first command that it takes again."""
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    await lease_runs_out(desk, run_id)
    rescuer = rescuer_of(desk)
    await fill(desk)
    async with asyncio.timeout(10):  # a rescue that waited would be the first to pass
        assert await rescuer.look() == (0, False)
    rescuer.calm = 600.0
    assert await rescuer.look() == (0, False)
    await fill(desk, full=False)
    assert await rescuer.look() == (0, False), "its shard is left alone for a while"
    assert await desk.queued() == 1
    assert (await desk.steps.journal(claim, 1.0)).ours
    assert (await desk.commit(claim, called(claim))).applied
    assert (await desk.header(run_id))["crashes"] == "0"


async def test_rescue_goes_on_when_the_calm_is_over(desk: Bench) -> None:
    run_id = await desk.create()
    await desk.claim(run_id)
    await lease_runs_out(desk, run_id)
    rescuer = rescuer_of(desk)
    rescuer.calm = 0.1
    await fill(desk)
    assert await rescuer.look() == (0, False)
    await fill(desk, full=False)

    async def rescued() -> bool:
        return (await rescuer.look())[0] == 1

    await until(rescued, within=30, what="the run dispatched again")


async def test_an_attempt_waits_for_no_trouble_while_other_calls_do(desk: Bench) -> None:
    connection = desk.opened.connection
    await fill(desk)
    waiting = asyncio.ensure_future(connection.execute("SET", "a", "b"))
    with pytest.raises(StoreError):
        await connection.attempt("SET", "c", "d")

    async def waits() -> bool:
        try:
            await connection.attempt("GET", "a")
        except StoreError:
            return True
        return False

    await until(waits, within=30)
    await fill(desk, full=False)
    await waiting
    assert await connection.attempt("GET", "a") == "b"
