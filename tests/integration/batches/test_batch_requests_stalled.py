"""Requests to batches whose client, or worker, stalls between two commands while others go on."""

import asyncio
import logging
from typing import Any

import pytest
from support.runs.batch_requests import in_force, manifest_of, requests_of
from support.runs.stored_runs import Bench, answered, plain_agent, with_settings

from stepfleet.orchestrator import AsyncFleet, ConfigurationError
from stepfleet.orchestrator.client.fleet import AsyncBatch
from stepfleet.orchestrator.protocol.claim import Refused
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.batches.batches import run_id_of
from stepfleet.orchestrator.store.batches.requests import BatchRequest, BatchRequests
from stepfleet.orchestrator.store.lua import run_script

AGENT = plain_agent()
RUNS = 8


BENCH: dict[str, Any] = {"agent": AGENT}


@pytest.fixture
async def batch(fleet: AsyncFleet) -> AsyncBatch:
    return await submitted(fleet, "first")


async def submitted(fleet: AsyncFleet, name: str) -> AsyncBatch:
    return await fleet.submit_batch([{"input": f"{name} {n}"} for n in range(RUNS)], AGENT)


async def stalled(desk: Bench, batch: AsyncBatch, place: int = 1) -> None:
    """Let ten seconds have passed in which nobody moved the batch's sweep."""
    await desk.opened.connection.execute("ZADD", keys.SWEEPS, place, batch.id)


async def what_is_asked(desk: Bench, batch: AsyncBatch) -> dict[str, str]:
    stored = desk.opened.keys.manifest(batch.id)
    fields = await desk.opened.connection.execute("HGETALL", stored)
    return {name: fields[name] for name in ("sweep", "order") if name in fields}


async def looked(desk: Bench) -> int:
    await desk.opened.connection.execute("DEL", keys.UPKEEP)
    return await with_settings(desk.opened, retention=60).upkeep.look()


class Stalling(BatchRequests):
    """A client whose process sleeps behind a page's scripts, before it notes them."""

    asleep: asyncio.Event
    awake: asyncio.Event

    async def sweep_runs(self, request: BatchRequest, *about: Any) -> Any:
        swept = await super().sweep_runs(request, *about)
        self.asleep.set()
        await self.awake.wait()
        return swept


def stalling(desk: Bench) -> Stalling:
    opened = desk.opened
    client = Stalling(opened, with_settings(opened, retention=3600).batches)
    client.asleep, client.awake = asyncio.Event(), asyncio.Event()
    return client


async def test_a_sweeper_that_stalled_leaves_nothing_of_a_finished_cancel(
    desk: Bench, batch: AsyncBatch
) -> None:
    client, request = stalling(desk), await in_force(desk, batch, "cancel")
    sweeping = asyncio.create_task(client.sweep(request))
    await client.asleep.wait()
    await stalled(desk, batch)
    assert await requests_of(desk).go_on() == 1
    client.awake.set()
    await sweeping
    assert await what_is_asked(desk, batch) == {}
    await stalled(desk, batch)
    assert await looked(desk) == 1
    assert await desk.opened.connection.execute("ZCARD", keys.SWEEPS) == 0
    assert (await batch.progress()).cancelled == RUNS
    assert await batch.pause() == 0


async def test_a_sweeper_that_stalled_makes_no_batch_that_was_purged(
    fleet: AsyncFleet, desk: Bench, batch: AsyncBatch
) -> None:
    client, request = stalling(desk), await in_force(desk, batch, "cancel")
    sweeping = asyncio.create_task(client.sweep(request))
    await client.asleep.wait()
    await batch.cancel()
    await stalled(desk, batch)
    await fleet.runs.purge(batch=batch.id)
    assert await desk.opened.connection.execute("ZCARD", keys.SWEEPS) == 0
    await client.flag(request)
    client.awake.set()
    await sweeping
    connection = desk.opened.connection
    assert await connection.execute("EXISTS", desk.opened.keys.manifest(batch.id)) == 0
    for shard in range(desk.opened.keys.shards):
        assert await connection.execute("HLEN", desk.opened.keys.flags(shard)) == 0


async def test_a_resume_behind_a_workers_list_holds(
    fleet: AsyncFleet, desk: Bench, batch: AsyncBatch
) -> None:
    second = await submitted(fleet, "second")
    for place, one in enumerate((batch, second), 1):
        await in_force(desk, one, "pause")
        await stalled(desk, one, place)
    worker = stalling(desk)
    going_on = asyncio.create_task(worker.go_on())
    await worker.asleep.wait()
    await second.resume()
    worker.awake.set()
    await going_on
    assert (await second.progress()).queued == RUNS
    await desk.claim(run_id_of(second.id, 0))


@pytest.mark.parametrize("word", ["pause", "cancel"])
async def test_an_old_request_does_not_come_back(desk: Bench, batch: AsyncBatch, word: str) -> None:
    old = await in_force(desk, batch, word)
    if word == "cancel":
        await requests_of(desk).sweep(old)
        run = await desk.stored(run_id_of(batch.id, 0))
        assert run.state.status == "cancelled"
    await batch.resume()
    await requests_of(desk).flag(old)
    assert (await requests_of(desk).sweep(old)).runs == 0
    for shard in range(desk.opened.keys.shards):
        flags = desk.opened.keys.flags(shard)
        assert not await desk.opened.connection.execute("HEXISTS", flags, f"b:{batch.id}")


async def test_the_end_of_a_request_leaves_the_next_one_alone(
    desk: Bench, batch: AsyncBatch
) -> None:
    resume = await in_force(desk, batch, "resume")

    class Overtaken(BatchRequests):
        async def lift(self, request: BatchRequest) -> None:
            await in_force(desk, batch, "cancel")
            await super().lift(request)

    opened = desk.opened
    batches = with_settings(opened, retention=3600).batches
    ending = Overtaken(opened, batches)
    await ending.sweep(resume)
    assert (await what_is_asked(desk, batch))["sweep"].startswith("cancel ")
    assert await desk.opened.connection.execute("ZSCORE", keys.SWEEPS, batch.id)
    await stalled(desk, batch)
    assert await requests_of(desk).go_on() == 1
    assert (await batch.progress()).cancelled == RUNS


async def test_an_entry_that_cannot_be_read_keeps_no_other_batch_waiting(
    fleet: AsyncFleet, desk: Bench, batch: AsyncBatch, caplog: pytest.LogCaptureFixture
) -> None:
    stored = desk.opened.keys.manifest(batch.id)
    await desk.opened.connection.execute("HSET", stored, "sweep", "nonsense", "expires", "never")
    await stalled(desk, batch, 1)
    await with_settings(desk.opened, retention=60).batches.look_at(batch.id)
    second = await submitted(fleet, "second")
    await in_force(desk, second, "cancel")
    await stalled(desk, second, 2)
    own = await desk.create(batch="other")
    claim = await desk.claim(own)
    await desk.commit(claim, answered(claim))
    with caplog.at_level(logging.ERROR):
        await looked(desk)
    assert f"batch {batch.id} is postponed" in caplog.text
    assert f"batch {batch.id} cannot be settled" in caplog.text
    assert (await second.progress()).cancelled == RUNS
    assert await desk.opened.connection.execute("TTL", desk.opened.keys.run(own)) > 0


async def test_a_manifest_of_which_only_a_request_is_left_is_none(
    desk: Bench, batch: AsyncBatch
) -> None:
    stored = desk.opened.keys.manifest(batch.id)
    await desk.opened.connection.execute("DEL", stored)
    await desk.opened.connection.execute("HSET", stored, "sweep", "cancel 1 1600")
    await stalled(desk, batch)
    assert await requests_of(desk).go_on() == 0
    assert await desk.opened.connection.execute("ZCARD", keys.SWEEPS) == 0
    batches = with_settings(desk.opened, retention=60).batches
    assert await batches.find(batch.id) is None


@pytest.mark.parametrize("fields", ["", "[]", '{"status": "cancelled"}'])
async def test_a_cancel_without_its_fields_counts_no_loss_twice(
    redis_url: str, desk: Bench, batch: AsyncBatch, fields: str
) -> None:
    own = run_id_of(batch.id, 0)
    await desk.claim(own)
    await desk.opened.connection.execute("HSET", desk.opened.keys.run(own), "lease", 1)
    request = BatchRequest(batch.id, RUNS, "cancel", 1, fields)
    await requests_of(desk).flag(request)
    assert (await requests_of(desk).sweep(request)).runs == 0
    await desk.claim(own)
    header = await desk.header(own)
    assert (header["crashes"], header.get("heard")) == ("1", None)
    await requests_of(desk).flag(BatchRequest(batch.id, RUNS, "pause", 2))
    assert (await desk.refused(run_id_of(batch.id, 1))).why is Refused.PAUSED


async def test_a_cancel_whose_client_dies_as_it_asks_is_finished_by_a_worker(
    desk: Bench, batch: AsyncBatch
) -> None:
    class Dying(BatchRequests):
        async def flag(self, request: BatchRequest) -> None:
            raise ConnectionAbortedError

        async def _ask(self, *args: Any) -> Any:
            assert await desk.opened.connection.execute("ZSCORE", keys.SWEEPS, batch.id)
            return await super()._ask(*args)

    opened = desk.opened
    batches = with_settings(opened, retention=3600).batches
    client = Dying(opened, batches)
    manifest = await batches.get(batch.id)
    with pytest.raises(ConnectionAbortedError):
        await client.ask(manifest, "cancel", "once", desk.control.batch_cancel("enough"))
    await stalled(desk, batch)
    assert await requests_of(desk).go_on() == 1
    assert (await batch.progress()).cancelled == RUNS
    await desk.opened.connection.execute("DEL", opened.keys.manifest(batch.id))
    with pytest.raises(ConfigurationError, match="no batch"):
        await client.ask(manifest, "cancel", "twice", "{}")
    assert await desk.opened.connection.execute("ZCARD", keys.SWEEPS) == 0


async def test_progress_of_a_sweep_is_not_taken_back(desk: Bench, batch: AsyncBatch) -> None:
    request = await in_force(desk, batch, "cancel")
    connection, stored = desk.opened.connection, [desk.opened.keys.manifest(batch.id)]
    for row in (5, 3):
        assert await run_script(connection, "swept", stored, request.number, row) == "noted"
    assert (await what_is_asked(desk, batch))["sweep"] == f"cancel {request.number} 5"
    assert (await requests_of(desk).ask(await manifest_of(desk, batch), "pause", "next")).number
    assert (await batch.progress()).cancelled == 3
