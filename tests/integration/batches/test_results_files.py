"""A results file, and a table, while runs of their batch end, and end anew."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.deadlines import until
from support.runs.stored_runs import Bench, answered, called, failed, plain_agent

from stepfleet.orchestrator import AsyncFleet, ConfigurationError, Fleet
from stepfleet.orchestrator.cli.result_file import Kind, Layout
from stepfleet.orchestrator.cli.results import (
    ResultOptions,
    collect,
    collect_as_they_end,
    to_its_end,
)
from stepfleet.orchestrator.client.fleet import AsyncBatch
from stepfleet.orchestrator.store.batches.batches import run_id_of

AGENT = plain_agent(max_steps=2)
BENCH: dict[str, Any] = {"agent": AGENT}
FULL = Layout("full")


async def submitted(fleet: AsyncFleet, count: int) -> AsyncBatch:
    lines = [{"id": f"q{n}", "input": f"question {n}"} for n in range(count)]
    return await fleet.submit_batch(lines, AGENT)


async def complete(
    desk: Bench, batch: AsyncBatch, *rows: int, step: int = 0, text: str = "answer"
) -> None:
    for row in rows:
        claim = await desk.claim(run_id_of(batch.id, row), step)
        assert (await desk.commit(claim, answered(claim, text=text))).applied


async def fail(desk: Bench, batch: AsyncBatch, *rows: int) -> None:
    for row in rows:
        claim = await desk.claim(run_id_of(batch.id, row))
        assert (await desk.commit(claim, failed(claim))).applied


async def write(batch: AsyncBatch, path: Path, layout: Layout = FULL) -> list[dict[str, Any]]:
    await collect_as_they_end(batch, path, layout, lambda _: None, ordered=True)
    return lines(path)


def lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


@pytest.mark.parametrize("kind", ["full", "slim"])
async def test_a_retried_run_has_its_newest_line_alone(
    fleet: AsyncFleet, desk: Bench, tmp_path: Path, kind: Kind
) -> None:
    batch, path = await submitted(fleet, 5), tmp_path / "out.jsonl"
    await complete(desk, batch, 0, 1, 2)
    await fail(desk, batch, 3, 4)
    found = await write(batch, path, Layout(kind))
    assert [line["status"] for line in found] == ["completed"] * 3 + ["error"] * 2
    kept = path.read_bytes().splitlines()[:3]

    assert await batch.retry() == 2
    await complete(desk, batch, 3, 4, text="at last")
    again = await write(batch, path, Layout(kind))
    assert [(line["id"], line["output"]) for line in again[3:]] == [
        ("q3", "at last"),
        ("q4", "at last"),
    ]
    assert [line["status"] for line in again] == ["completed"] * 5
    assert path.read_bytes().splitlines()[:3] == kept


async def test_a_further_message_and_a_raised_limit_reach_the_file(
    fleet: AsyncFleet, desk: Bench, tmp_path: Path
) -> None:
    batch, path = await submitted(fleet, 2), tmp_path / "out.jsonl"
    await complete(desk, batch, 0)
    for step in (0, 1):
        claim = await desk.claim(run_id_of(batch.id, 1), step)
        await desk.commit(claim, called(claim))
    assert [line["stop_reason"] for line in await write(batch, path)] == [
        "completed",
        "steps_limit",
    ]

    await fleet.runs.send(run_id_of(batch.id, 0), "And in euros?")
    await complete(desk, batch, 0, step=1, text="in euros")
    assert await batch.retry(max_steps=4) == 1
    await complete(desk, batch, 1, step=2, text="at last")
    found = await write(batch, path)
    assert [line["output"] for line in found] == ["in euros", "at last"]


async def test_a_retry_while_the_file_is_written_reaches_it(
    fleet: AsyncFleet, desk: Bench, tmp_path: Path
) -> None:
    batch, path = await submitted(fleet, 3), tmp_path / "out.jsonl"
    await fail(desk, batch, 0)
    writing = asyncio.create_task(write(batch, path))
    await until(lambda: _has(path, 1), within=60)
    assert await batch.retry() == 1
    await complete(desk, batch, 0)
    await until(lambda: _has(path, 2), within=60)
    await complete(desk, batch, 1, 2)
    found = await asyncio.wait_for(writing, 60)
    assert [(line["id"], line["status"]) for line in found] == [
        (f"q{row}", "completed") for row in range(3)
    ]


async def _has(path: Path, count: int) -> bool:
    return path.exists() and path.read_bytes().count(b"\n") >= count


async def test_openai_lines_of_retried_runs_are_replaced(
    fleet: AsyncFleet, desk: Bench, tmp_path: Path
) -> None:
    batch, path = await submitted(fleet, 2), tmp_path / "out.jsonl"
    await complete(desk, batch, 0)
    await fail(desk, batch, 1)
    first = await write(batch, path, Layout("openai"))
    assert [bool(line["error"]) for line in first] == [False, True]
    await batch.retry()
    await complete(desk, batch, 1)
    second = await write(batch, path, Layout("openai"))
    assert [bool(line["error"]) for line in second] == [False, False]
    assert second[0] == first[0]


async def test_results_that_the_caller_has_do_not_come_again(
    fleet: AsyncFleet, desk: Bench
) -> None:
    batch = await submitted(fleet, 3)
    await complete(desk, batch, 0, 1)
    await fail(desk, batch, 2)
    known = {one.run_id: one.end_time async for one in batch.results()}
    assert [one.row async for one in batch.results(known=known)] == []
    await batch.retry()
    await complete(desk, batch, 2)
    assert [one.row async for one in batch.results(known=known, ordered=True)] == [2]
    assert list(batch.run_ids()) == [run_id_of(batch.id, row) for row in range(3)]


async def test_a_batch_is_a_table_in_the_order_of_its_input(
    fleet: AsyncFleet, desk: Bench, redis_url: str, tmp_path: Path
) -> None:
    batch = await submitted(fleet, 3)
    await complete(desk, batch, 2, 0)
    await fail(desk, batch, 1)
    found = await batch.to_arrow("id,status,cost_usd,metadata.none")
    assert found.to_pydict() == {
        "id": ["q0", "q1", "q2"],
        "status": ["completed", "error", "completed"],
        "cost_usd": [0.25, 0.0, 0.25],
        "metadata.none": [None] * 3,
    }

    def blocking() -> Any:
        with Fleet(redis_url) as plain:
            return plain.batches.get(batch.id).to_pandas(["id", "error"], failed=True)

    frame = await asyncio.to_thread(blocking)
    assert frame["id"].tolist() == ["q1"]
    assert frame["error"][0]

    out = tmp_path / "out.csv"
    options = ResultOptions(out, fields="id,output")
    written = await collect(batch, options, options.layout("stepfleet"), follow=False, failed=False)
    assert (written, out.read_text().splitlines()[0]) == (3, "id,output")
    assert [line.split(",")[0] for line in out.read_text().splitlines()[1:]] == ["q0", "q1", "q2"]


@pytest.mark.parametrize("kind", ["full", "slim", "openai"])
async def test_results_of_two_batches_are_not_mixed_in_one_file(
    fleet: AsyncFleet, desk: Bench, tmp_path: Path, kind: Kind
) -> None:
    path, layout = tmp_path / "out.jsonl", Layout(kind)
    one, other = await submitted(fleet, 2), await submitted(fleet, 3)
    for batch, rows in ((one, (0, 1)), (other, (0, 1, 2))):
        await complete(desk, batch, *rows)
    await write(one, path, layout)
    before = path.read_bytes()
    told = f"2 of its 2 lines are of another batch than {other.id} .*nothing was written"
    with pytest.raises(ConfigurationError, match=told):
        await write(other, path, layout)
    assert path.read_bytes() == before
    await write(one, path, layout)
    assert path.read_bytes() == before


async def test_a_cancel_waits_for_the_thread_that_writes_the_file(tmp_path: Path) -> None:
    """Ctrl-C while results are settled: nothing else writes, or closes, the file meanwhile."""
    begun, goes_on = threading.Event(), threading.Event()
    path = tmp_path / "out.jsonl"

    def work() -> None:
        with path.open("wb") as file:
            begun.set()
            assert goes_on.wait(60)
            file.write(b"whole\n")

    writing = asyncio.create_task(to_its_end(work))
    assert await asyncio.to_thread(begun.wait, 60)
    writing.cancel()
    done, _ = await asyncio.wait([writing], timeout=0.1)
    assert not done
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert path.read_bytes() == b"whole\n"


async def test_an_error_of_the_thread_that_writes_is_raised(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        await to_its_end(tmp_path.read_bytes)
