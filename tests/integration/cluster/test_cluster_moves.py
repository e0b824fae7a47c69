"""Slots of a real Redis Cluster that move while runs are in them: nothing is lost, nothing torn."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest
from support.deadlines import until
from support.runs.stored_runs import Bench, answered, bench, called
from support.servers.redis_cluster import RedisCluster
from support.servers.redis_servers import RedisServer

from stepfleet.orchestrator import StopReason, StoreError
from stepfleet.orchestrator.protocol.claim import Claim, Work
from stepfleet.orchestrator.redis_client.cluster import slot_of

PARTS = ("", ":log", ":events", ":journal", ":outcomes", ":lost")


@pytest.fixture
async def desk(
    cluster: RedisCluster, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[Bench]:
    cluster.flush()
    redis_server.flush()
    caplog.set_level(logging.WARNING, "stepfleet")
    async with bench(
        cluster.url, broker_url=redis_server.url, lease=600, grace=600, patience=60
    ) as opened:
        yield opened


def slot_of_run(desk: Bench, run_id: str) -> int:
    return slot_of(desk.opened.keys.run(run_id))


def whole(cluster: RedisCluster, keys: Iterable[str]) -> dict[str, Any]:
    """Return what every node has of these keys, whoever owns their slot."""
    found: dict[str, Any] = {}
    for server in cluster.masters:
        for key in keys:
            dump = cluster.peek(server, key)
            if dump is not None:
                found[f"{server.port} {key}"] = dump
    return found


async def test_calls_follow_a_slot_that_has_moved(desk: Bench, cluster: RedisCluster) -> None:
    """MOVED: the run goes on where its records are now."""
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    slot = slot_of_run(desk, run_id)
    to = cluster.another(cluster.owner(slot))
    assert await asyncio.to_thread(cluster.move, slot, to) >= 3
    assert (await desk.commit(claim, called(claim))).applied
    assert (await desk.header(run_id))["step"] == "1"
    assert (await desk.counters())["steps"] == 1


async def test_a_single_key_is_read_where_it_is_while_its_slot_moves(
    desk: Bench, cluster: RedisCluster
) -> None:
    """ASK: the header has gone ahead, the log is still there."""
    run_id = await desk.create()
    slot, key = slot_of_run(desk, run_id), desk.opened.keys.run(run_id)
    before = await desk.stored(run_id)
    to = cluster.another(cluster.owner(slot))
    cluster.begin_move(slot, to)
    cluster.move_keys(slot, to, key)
    assert await desk.stored(run_id) == before
    cluster.move_keys(slot, to)
    cluster.end_move(slot, to)
    assert await desk.stored(run_id) == before


@pytest.mark.parametrize("gone", [(":log",), ("", "due"), ("", "due", ":log", ":events")])
async def test_a_script_waits_until_all_of_its_slot_has_moved(
    desk: Bench,
    cluster: RedisCluster,
    caplog: pytest.LogCaptureFixture,
    gone: tuple[str, ...],
) -> None:
    """Whichever keys are there: a script that found some of them would tear the run."""
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    run_key, shard = desk.opened.keys.run(run_id), desk.opened.keys.shard_of(run_id)
    due = desk.opened.keys.due(shard)
    keys = [*(f"{run_key}{part}" for part in PARTS), due, desk.opened.keys.batch(shard, "b1")]
    slot = slot_of(run_key)
    to = cluster.another(cluster.owner(slot))
    cluster.begin_move(slot, to)
    cluster.move_keys(slot, to, *(due if part == "due" else f"{run_key}{part}" for part in gone))
    before = whole(cluster, keys)

    commit = asyncio.create_task(desk.commit(claim, called(claim)))

    async def waits() -> bool:
        return "is moving data" in caplog.text

    await until(waits, within=30, what="a call that waits")
    assert not commit.done()
    assert whole(cluster, keys) == before
    cluster.move_keys(slot, to)
    cluster.end_move(slot, to)
    assert (await commit).applied
    assert (await desk.header(run_id))["step"] == "1"
    assert [step.result.step for step in (await desk.stored(run_id)).log] == [1]
    assert (await desk.counters())["steps"] == 1
    assert caplog.text.count("is moving data") == 1


async def test_runs_in_other_slots_go_on_while_one_slot_moves(
    desk: Bench, cluster: RedisCluster
) -> None:
    run_id = await desk.create()
    slot = slot_of_run(desk, run_id)
    others = [await desk.create() for _ in range(20)]
    others = [other for other in others if slot_of_run(desk, other) != slot]
    assert others
    to = cluster.another(cluster.owner(slot))
    cluster.begin_move(slot, to)
    waiting = asyncio.create_task(desk.steps.claim(Work(run_id, 0), "t"))
    try:
        for other in others:
            claim = await desk.claim(other)
            assert (await desk.commit(claim, answered(claim))).applied
        assert not waiting.done()
    finally:
        cluster.move_keys(slot, to)
        cluster.end_move(slot, to)
    assert isinstance(await waiting, Claim)


async def test_a_call_that_waits_for_too_long_says_that_its_slot_moves(
    desk: Bench, cluster: RedisCluster
) -> None:
    run_id = await desk.create()
    slot = slot_of_run(desk, run_id)
    to = cluster.another(cluster.owner(slot))
    cluster.begin_move(slot, to)
    try:
        desk.opened.connection.patience = 0.2
        with pytest.raises(StoreError, match="the cluster moves this part of it: wait, or raise"):
            await desk.steps.claim(Work(run_id, 0), "t")
    finally:
        desk.opened.connection.patience = 60
        cluster.move_keys(slot, to)
        cluster.end_move(slot, to)
    assert isinstance(await desk.steps.claim(Work(run_id, 0), "t"), Claim)


RUNS = 60
STEPS = 5


async def test_a_reshard_in_the_middle_of_a_batch_loses_nothing(
    desk: Bench, cluster: RedisCluster
) -> None:
    """All shards' slots move on by one node, one after the other, while runs are at work."""
    run_ids = [await desk.create() for _ in range(RUNS)]
    halfway = asyncio.Event()
    done = 0

    async def work(run_id: str) -> None:
        nonlocal done
        for step in range(STEPS):
            claim = await desk.claim(run_id, step)
            attempt = called(claim) if step < STEPS - 1 else answered(claim)
            assert (await desk.commit(claim, attempt)).applied
            done += 1
            if done >= RUNS // 2:
                halfway.set()
            # The batch lasts for as long as slots move.
            if step == 1:
                await moved.wait()

    moved = asyncio.Event()
    workers = asyncio.gather(*(work(run_id) for run_id in run_ids))
    await halfway.wait()
    keys = desk.opened.keys
    for shard in range(keys.shards):
        slot = slot_of(keys.due(shard))
        here = cluster.masters.index(cluster.owner(slot))
        to = cluster.masters[(here + 1) % len(cluster.masters)]
        await asyncio.to_thread(cluster.move, slot, to)
        if shard == keys.shards // 2:
            moved.set()
    await workers

    for run_id in run_ids:
        result = (await desk.stored(run_id)).result()
        assert result.stop_reason is StopReason.COMPLETED
        assert [step.step for step in result.steps] == list(range(1, STEPS + 1))
        assert result.lost_attempts == ()
        assert await desk.due(run_id) is None
    counters = await desk.counters()
    assert counters["total"] == counters["status:completed"] == RUNS
    assert counters["steps"] == RUNS * STEPS
    assert "open" not in counters
    assert "lost" not in counters
