"""What refers to archived runs: submissions anew, runs and batches after them, costs, forks."""

import uuid
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from support.runs.archives import (
    archive,
    check_files,
    end,
    ended,
    ended_batch,
    in_redis,
    is_known,
    move,
)
from support.runs.stored_runs import Bench, plain_agent, with_settings

from stepfleet.orchestrator import RunStatus
from stepfleet.orchestrator.batches.following import FollowUpSubmission
from stepfleet.worker.runtime.links import LinkedRuns

AGENT = plain_agent(max_steps=6)


async def follow(desk: Bench) -> None:
    """Do what a worker does for batches that follow others."""
    await desk.keep_up()
    store = with_settings(desk.opened, retention=60)
    due, _ = await store.follow_ups.due()
    for batch_id in due:
        await FollowUpSubmission(store).look(batch_id)


async def test_submitting_again_what_is_archived_creates_and_costs_nothing(
    redis_url: str, tmp_path: Path
) -> None:
    """OPS-05: a batch by its lines or its key, a run by its id or its key."""
    async with archive(redis_url, tmp_path, AGENT) as (desk, fleet):
        lines = [{"id": f"q{n}", "input": "x"} for n in range(3)]
        batch = await fleet.submit_batch(lines, agent=AGENT, idempotency_key="monthly")
        names: tuple[dict[str, Any], ...] = (
            {"run_id": str(uuid.uuid4())},
            {"idempotency_key": "order-77"},
        )
        runs = [await fleet.submit(AGENT, "hello", **name) for name in names]
        for one in (*batch.run_ids(), *runs):
            await end(desk, one)
        await desk.keep_up()
        assert (await move(desk)).runs == 5
        queued, costs = await desk.queued(), await fleet.costs()
        again = await fleet.submit_batch(lines, agent=AGENT, idempotency_key="monthly")
        assert (again.id, again.is_new) == (batch.id, False)
        assert [await fleet.submit(AGENT, "hello", **name) for name in names] == runs
        assert await desk.queued() == queued
        assert await in_redis(desk, [*batch.run_ids(), *runs]) == []
        assert (await again.progress()).completed == 3
        assert len([one async for one in again.results()]) == 3
        assert await fleet.costs() == costs
        assert (await move(desk)).runs == 0


async def test_runs_and_batches_after_archived_ones_get_their_results(
    redis_url: str, tmp_path: Path
) -> None:
    """OPS-05: `after`, `then` with inputs and outputs, and a fork of an archived run."""
    async with archive(redis_url, tmp_path, AGENT) as (desk, fleet):
        first = await ended_batch(desk, fleet, 3, failing=(2,))
        before = await ended(desk, "the facts")
        bad = await ended(desk, well=False)
        waiting = await fleet.submit(AGENT, "Use {output}", after=before)
        assert (await move(desk)).runs == 5
        later = await fleet.submit(AGENT, "Mind {output}", after=[before])
        never = await fleet.submit(AGENT, "Mind {output}", after=[bad])
        for one, text in ((waiting, "Use the facts"), (later, "Mind the facts")):
            await LinkedRuns(desk.opened).dependents.attend(one)
            assert (await fleet.runs.show(one)).state.messages[-1].text == text
            await end(desk, one)
        await LinkedRuns(desk.opened).dependents.attend(never)
        assert (await fleet.runs.result(never)).status is RunStatus.ERROR
        second = await first.then(AGENT, "{id} / {input} / {output}")
        await follow(desk)
        assert (await second.progress()).total == 2
        there = [one for one in second.run_ids() if await is_known(fleet, one)]
        found = [await fleet.runs.show(one) for one in there]
        assert [one.state.messages[-1].text for one in found] == [
            f"line-{n} / question {n} / answer {n}" for n in range(2)
        ]
        fork = await fleet.history.fork(before, at=0)
        assert (await fleet.runs.result(fork)).origin is not None
        await check_files(desk)


async def test_costs_are_the_same_before_and_after(redis_url: str, tmp_path: Path) -> None:
    """OPS-05: sums, and the single calls of a run, of a batch and of all runs, each once."""
    async with archive(redis_url, tmp_path, AGENT) as (desk, fleet):
        batch = await ended_batch(desk, fleet, 4)
        await ended(desk, tenant="acme")
        live = await desk.create(batch="")

        async def lines(**which: Any) -> list[str]:
            found = [one async for one in fleet.cost_lines(**which)]
            return sorted(one.model_dump_json() for one in found)

        conditions: list[dict[str, str]] = [{}, {"batch": batch.id}, {"tenant": "acme"}]
        before = [await lines(**which) for which in conditions]
        sums = await fleet.costs("batch,tenant")
        assert [len(one) for one in before] == [5, 4, 1]
        assert (await move(desk)).runs == 5
        assert [await lines(**which) for which in conditions] == before
        assert await fleet.costs("batch,tenant") == sums
        some = list(batch.run_ids())[:2]
        assert await desk.opened.returning.restore(some) == 2
        assert [await lines(**which) for which in conditions] == before
        assert await in_redis(desk, [live]) == [live]


@pytest.mark.parametrize("runs", [1_000, pytest.param(5_000, marks=pytest.mark.long)])
async def test_redis_keeps_little_of_an_archived_run(
    runs: int, redis_url: str, tmp_path: Path
) -> None:
    """OPS-05: at most 200 bytes each, of runs alone and of those of a batch."""
    async with archive(redis_url, tmp_path, AGENT) as (desk, fleet):
        with Redis.from_url(redis_url, decode_responses=True) as client:
            model = await ended(desk)
            keys = desk.opened.keys
            stored = client.hgetall(keys.run(model))
            log = client.hgetall(f"{keys.run(model)}:log")
            await move(desk)
            empty = memory_of(client)
            ids = [str(uuid.uuid4()) for _ in range(runs)]
            with client.pipeline(transaction=False) as sent:
                for run_id in ids:
                    shard = keys.shard_of(run_id)
                    sent.hset(keys.run(run_id), mapping=stored)
                    sent.hset(f"{keys.run(run_id)}:log", mapping=log)
                    sent.zadd(keys.aging(shard), {run_id: 1})
                    sent.zadd(f"{keys.tag(shard)}runs:completed", {run_id: stored["created"]})
                sent.execute()
            before = memory_of(client) - empty
            assert (await move(desk)).runs == runs
            after = memory_of(client) - empty
        assert before / runs > 1_500
        assert after / runs <= 200
        assert (await fleet.runs.result(ids[-1])).success


def memory_of(client: Redis) -> int:
    """Return what all keys take, in bytes."""
    names = list(client.scan_iter("*", count=1_000))
    with client.pipeline(transaction=False) as sent:
        for name in names:
            sent.memory_usage(name, samples=0)
        return sum(int(one or 0) for one in sent.execute())
