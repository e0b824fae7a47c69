"""Retry of a batch's runs: each as by itself, and many of them in few round trips."""

from typing import Any

import orjson
import pytest
from support.runs.stored_runs import Bench, answered, called, failed, plain_agent

from stepfleet.orchestrator import AsyncFleet
from stepfleet.orchestrator.client import control
from stepfleet.orchestrator.client.fleet import AsyncBatch
from stepfleet.orchestrator.store.batches.batches import run_id_of

AGENT = plain_agent(max_steps=2)
MANY = control.ROWS + 50


BENCH: dict[str, Any] = {"agent": AGENT}


async def submitted(fleet: AsyncFleet, count: int, key: str | None = None) -> AsyncBatch:
    lines: list[dict[str, Any]] = [{"id": f"q{n}", "input": f"question {n}"} for n in range(count)]
    lines[0]["metadata"] = {"topic": "tides"}
    lines[1]["overrides"] = {"settings": {"temperature": 0.5}}
    return await fleet.submit_batch(lines, AGENT, idempotency_key=key)


async def ended_in_each_way(fleet: AsyncFleet, desk: Bench, key: str) -> AsyncBatch:
    """Return a batch with five runs that can be retried, one that completed, and an open one."""
    batch = await submitted(fleet, 7, key)
    failing, later, limited, cancelled, broken, completed, _ = (
        run_id_of(batch.id, row) for row in range(7)
    )
    for run_id, step in ((later, 0), (limited, 0), (limited, 1), (broken, 0)):
        claim = await desk.claim(run_id, step)
        await desk.commit(claim, called(claim, error=run_id == broken))
    for run_id, step in ((failing, 0), (later, 1)):
        claim = await desk.claim(run_id, step)
        await desk.commit(claim, failed(claim))
    await fleet.runs.cancel(cancelled)
    claim = await desk.claim(completed)
    await desk.commit(claim, answered(claim))
    return batch


async def as_retried(desk: Bench, batch: AsyncBatch) -> list[dict[str, Any]]:
    """Return what the store holds of the batch's runs, but for ids and times."""
    found = []
    for row in range(7):
        run_id = run_id_of(batch.id, row)
        header = await desk.header(run_id)
        stored: dict[str, Any] = {
            name: header.get(name)
            for name in ("status", "step", "overrides", "since", "attempt", "seq", "stop_reason")
        }
        if header["status"] != "completed":
            slim = orjson.loads(header["slim"].replace(run_id, "the run"))
            for time in ("started_at", "updated_at", "execution_started_at"):
                stored[time] = slim["info"].pop(time, None) is not None
            stored["slim"] = slim
        for part in ("journal", "log", "lost"):
            key = f"{desk.opened.keys.run(run_id)}:{part}"
            held = await desk.opened.connection.execute("HGETALL", key)
            names = sorted(name for name in held if not name.startswith("by:"))  # claims' tokens
            stored[part] = held if part == "journal" else names
        found.append(stored)
    return found


async def test_a_batch_is_retried_as_each_of_its_runs_would_be(
    fleet: AsyncFleet, desk: Bench
) -> None:
    one_by_one, at_once = [await ended_in_each_way(fleet, desk, key) for key in "ab"]
    for row in range(5):
        answer = await fleet.runs.retry(run_id_of(one_by_one.id, row), max_steps=4)
        assert answer.outcome == "retried"
    before = await desk.queued()
    assert await at_once.retry(failed_only=False, max_steps=4) == 5
    assert await desk.queued() == before + 5
    assert await as_retried(desk, at_once) == await as_retried(desk, one_by_one)
    assert await desk.counters(at_once.id) == await desk.counters(one_by_one.id)
    for row, step in enumerate((0, 1, 2, 0, 0)):
        await desk.claim(run_id_of(at_once.id, row), step)


async def test_a_batchs_retry_reads_little_and_says_how_far_it_is(
    fleet: AsyncFleet, desk: Bench
) -> None:
    batch = await submitted(fleet, MANY)
    await batch.cancel()
    connection = desk.opened.connection
    await connection.execute("CONFIG", "RESETSTAT")
    rows: list[int] = []
    assert await batch.retry(rows.append, failed_only=False) == MANY
    assert rows == [control.ROWS, MANY]
    used = await connection.execute("INFO", "commandstats")
    whole = used.get("cmdstat_hgetall", {"calls": 0})["calls"]
    assert whole < MANY, "no run is read whole"


async def test_a_retry_that_was_broken_off_goes_on_when_it_is_asked_again(
    fleet: AsyncFleet, desk: Bench
) -> None:
    batch = await submitted(fleet, MANY)
    await batch.cancel()

    def break_off(_: int) -> None:
        raise KeyError("the caller is gone")

    with pytest.raises(KeyError):
        await batch.retry(break_off, failed_only=False)
    await desk.opened.connection.execute("SCRIPT", "FLUSH")
    assert await batch.retry(failed_only=False) == MANY - control.ROWS
    assert await batch.retry(failed_only=False) == 0
    assert (await batch.progress()).open == MANY
