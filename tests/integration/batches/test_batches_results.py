"""A batch's results and numbers while its runs end, one commit at a time."""

import asyncio
from typing import Any

import pytest
from support.deadlines import until
from support.runs.stored_runs import Bench, answered, called, failed, plain_agent

from stepfleet.orchestrator import (
    AgentRunResult,
    AsyncFleet,
    ConfigurationError,
    RunStatus,
    StopReason,
)
from stepfleet.orchestrator.batches.results import as_line, full
from stepfleet.orchestrator.client.fleet import AsyncBatch
from stepfleet.orchestrator.store.batches.batches import run_id_of
from stepfleet.orchestrator.store.runs import reading

AGENT = plain_agent(max_steps=2)


BENCH: dict[str, Any] = {"agent": AGENT}


async def submitted(fleet: AsyncFleet, count: int) -> AsyncBatch:
    lines = [{"id": f"q{n}", "input": f"question {n}"} for n in range(count)]
    return await fleet.submit_batch(lines, AGENT)


async def complete(desk: Bench, batch: AsyncBatch, *rows: int) -> None:
    for row in rows:
        await complete_at(desk, batch, row, 0)


async def complete_at(desk: Bench, batch: AsyncBatch, row: int, step: int) -> None:
    claim = await desk.claim(run_id_of(batch.id, row), step)
    assert (await desk.commit(claim, answered(claim, text=f"answer {row}"))).applied


async def fail(desk: Bench, batch: AsyncBatch, row: int, step: int = 0) -> None:
    claim = await desk.claim(run_id_of(batch.id, row), step)
    assert (await desk.commit(claim, failed(claim))).applied


async def go_to_limit(desk: Bench, batch: AsyncBatch, row: int) -> None:
    for step in (0, 1):
        claim = await desk.claim(run_id_of(batch.id, row), step)
        assert (await desk.commit(claim, called(claim))).applied


async def collect(batch: AsyncBatch, **options: Any) -> list[AgentRunResult]:
    return [result async for result in batch.results(**options)]


async def test_progress_counts_every_way_to_end_and_equals_the_recount(
    fleet: AsyncFleet, desk: Bench
) -> None:
    """Counters are exact under duplicates: they move inside the guarded scripts."""
    batch = await submitted(fleet, 10)
    await complete(desk, batch, 0, 1, 2)
    await fail(desk, batch, 3)
    await go_to_limit(desk, batch, 4)
    await fleet.runs.cancel(run_id_of(batch.id, 5))
    await fleet.runs.pause(run_id_of(batch.id, 6))
    await desk.claim(run_id_of(batch.id, 7))
    progress = await batch.progress()
    assert progress.by_reason == {
        "completed": 3,
        "error": 1,
        "steps_limit": 1,
        "user_requested": 1,
    }
    assert (progress.completed, progress.failed, progress.stopped, progress.cancelled) == (
        3,
        1,
        1,
        1,
    )
    assert (progress.queued, progress.in_progress, progress.paused) == (2, 1, 1)
    assert progress.done + progress.open == progress.total == 10
    results = await collect(batch, follow=False)
    assert progress.steps == sum(result.steps_used for result in results) == 6
    assert progress.tokens == sum(result.usage.total_tokens for result in results) == 75
    assert progress.cost_usd == sum(result.cost_usd for result in results) == 1.25
    assert progress.llm_calls == sum(result.usage.llm_calls for result in results)


async def test_results_come_as_runs_end_and_stop_behind_the_last_one(
    fleet: AsyncFleet, desk: Bench
) -> None:
    batch = await submitted(fleet, 6)
    seen: list[int | None] = []

    async def follow() -> None:
        async for result in batch.results():
            seen.append(result.row)  # noqa: PERF401 - looked at meanwhile

    following = asyncio.create_task(follow())
    for row in (4, 0, 5, 2):
        await complete(desk, batch, row)
        await until(lambda row=row: _is_in(row, seen), within=60)  # type: ignore[misc]
    assert not following.done()
    await complete(desk, batch, 1, 3)
    await asyncio.wait_for(following, 60)
    assert sorted(row for row in seen if row is not None) == list(range(6))


async def _is_in(row: int, seen: list[int | None]) -> bool:
    return row in seen


async def test_ordered_results_come_in_the_order_of_the_lines(
    fleet: AsyncFleet, desk: Bench
) -> None:
    batch = await submitted(fleet, 5)
    seen: list[int | None] = []

    async def follow() -> None:
        async for result in batch.results(ordered=True):
            seen.append(result.row)  # noqa: PERF401 - looked at meanwhile

    following = asyncio.create_task(follow())
    await complete(desk, batch, 1, 2)
    assert [result.row for result in await collect(batch, ordered=True, follow=False)] == [1, 2]
    assert seen == []
    await complete(desk, batch, 0)
    await until(lambda: _has(seen, 3), within=60)
    assert seen == [0, 1, 2]
    await complete(desk, batch, 4, 3)
    await asyncio.wait_for(following, 60)
    assert seen == [0, 1, 2, 3, 4]


async def _has(seen: list[int | None], count: int) -> bool:
    return len(seen) >= count


async def test_only_what_has_ended_comes_without_following(fleet: AsyncFleet, desk: Bench) -> None:
    batch = await submitted(fleet, 4)
    assert await collect(batch, follow=False) == []
    await complete(desk, batch, 3)
    (result,) = await collect(batch, follow=False)
    assert (result.row, result.output, result.status) == (3, "answer 3", RunStatus.COMPLETED)


async def test_only_runs_that_did_not_complete_come_on_request(
    fleet: AsyncFleet, desk: Bench
) -> None:
    batch = await submitted(fleet, 4)
    await complete(desk, batch, 0, 2)
    await fail(desk, batch, 1)
    await go_to_limit(desk, batch, 3)
    for ordered in (False, True):
        results = await collect(batch, failed=True, ordered=ordered)
        assert sorted(result.row or 0 for result in results) == [1, 3]


async def test_a_retried_run_leaves_the_ended_ones_and_comes_again(
    fleet: AsyncFleet, desk: Bench
) -> None:
    batch = await submitted(fleet, 2)
    await complete(desk, batch, 0)
    await fail(desk, batch, 1)
    assert len(await collect(batch)) == 2
    assert await batch.retry() == 1
    assert [result.row for result in await collect(batch, follow=False)] == [0]
    progress = await batch.progress()
    assert (progress.failed, progress.in_progress, progress.open) == (0, 1, 1)
    assert progress.by_reason == {"completed": 1}
    assert (progress.steps, progress.lost) == (1, 1)
    await complete(desk, batch, 1)
    results = await collect(batch)
    assert sorted(result.row or 0 for result in results) == [0, 1]
    assert (await batch.progress()).ok


async def test_more_results_than_are_read_at_once_all_come_once(
    fleet: AsyncFleet, desk: Bench
) -> None:
    batch = await submitted(fleet, 1200)
    assert await batch.cancel() == 1200
    rows = [result.row async for result in batch.results()]
    assert sorted(row for row in rows if row is not None) == list(range(1200))
    assert [r.row async for r in batch.results(ordered=True)] == list(range(1200))


async def test_results_are_there_for_a_client_that_comes_later(redis_url: str, desk: Bench) -> None:
    """RUN-33"""
    async with AsyncFleet(redis_url) as first:
        batch = await submitted(first, 1)
        await complete(desk, batch, 0)
    async with AsyncFleet(redis_url) as second:
        (result,) = await collect(await second.batches.get(batch.id))
        assert result == await second.runs.result(run_id_of(batch.id, 0))
        assert result.output == "answer 0"


async def test_results_of_a_batch_are_those_of_its_runs_one_by_one(
    fleet: AsyncFleet, desk: Bench
) -> None:
    lines = [{"id": f"q{n}", "input": "é \u2028", "metadata": {"ü": n}} for n in range(5)]
    batch = await fleet.submit_batch(lines, AGENT, tenant="acme", max_steps=7)
    await complete(desk, batch, 0)
    await fail(desk, batch, 1)
    assert await batch.retry() == 1  # a lost attempt
    claim = await desk.claim(run_id_of(batch.id, 1))
    await desk.commit(claim, called(claim, error=True))
    claim = await desk.claim(run_id_of(batch.id, 2))
    await desk.commit(claim, called(claim))
    await complete_at(desk, batch, 2, step=1)
    await fleet.runs.cancel(run_id_of(batch.id, 3))
    found = await collect(batch, follow=False, ordered=True)
    alone = [await fleet.runs.result(run_id_of(batch.id, row)) for row in range(4)]
    assert [as_line(full(one)) for one in found] == [as_line(full(one)) for one in alone]
    assert found == alone
    names = ["id", *AgentRunResult.model_fields]  # an unfinished line is known by its beginning
    assert [list(full(one))[: len(names)] for one in found] == [names] * 4
    assert [len(one.lost_attempts) for one in found] == [0, 1, 0, 0]
    assert [one.steps_used for one in found] == [1, 1, 2, 0]


async def test_a_run_that_goes_on_while_its_result_is_read_is_left_out(
    fleet: AsyncFleet, desk: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its header and its steps would be of two executions."""
    monkeypatch.setattr(reading, "STEPS", 1)
    batch = await submitted(fleet, 3)
    run_ids = list(batch.run_ids())
    for row in range(3):
        await fail(desk, batch, row)
    results = desk.opened.results.read(run_ids)
    assert (await anext(results))[0].row == 0
    await fleet.runs.retry(run_ids[1])
    assert [one.row async for one, _ in results] == [2]


async def test_waiting_for_a_batch_ends_with_its_last_run(fleet: AsyncFleet, desk: Bench) -> None:
    batch = await submitted(fleet, 2)
    with pytest.raises(TimeoutError):
        await batch.wait(timeout=0.2)
    waiting = asyncio.create_task(batch.wait(timeout=60))
    await complete(desk, batch, 0, 1)
    assert (await waiting).ok


async def test_requests_reach_all_runs_of_a_batch(fleet: AsyncFleet, desk: Bench) -> None:
    batch = await submitted(fleet, 5)
    await complete(desk, batch, 0)
    claim = await desk.claim(run_id_of(batch.id, 1))
    assert await batch.pause() == 4
    assert (await batch.progress()).paused == 3
    await desk.commit(claim, called(claim))
    assert (await batch.progress()).paused == 4
    assert await batch.resume() == 4
    progress = await batch.progress()
    assert (progress.paused, progress.open) == (0, 4)
    assert await batch.cancel() == 4
    progress = await batch.progress()
    assert (progress.cancelled, progress.completed, progress.ended) == (4, 1, True)
    assert await batch.cancel() == 0
    assert await batch.retry() == 0
    assert await batch.retry(failed_only=False) == 4
    assert (await batch.progress()).open == 4


async def test_runs_at_a_limit_are_retried_only_with_a_higher_one(
    fleet: AsyncFleet, desk: Bench
) -> None:
    batch = await submitted(fleet, 2)
    await go_to_limit(desk, batch, 0)
    await complete(desk, batch, 1)
    with pytest.raises(ConfigurationError, match=r"would end at once again .*max_steps=4"):
        await batch.retry()
    assert await batch.retry(max_steps=4) == 1
    run = await fleet.runs.show(run_id_of(batch.id, 0))
    assert (run.step, run.config.max_steps) == (2, 4)
    claim = await desk.claim(run.run_id, 2)
    await desk.commit(claim, answered(claim))
    result = await fleet.runs.result(run.run_id)
    assert (result.stop_reason, result.steps_used) == (StopReason.COMPLETED, 3)
    assert (await batch.progress()).ok


async def test_an_unknown_batch_is_reported(fleet: AsyncFleet) -> None:
    with pytest.raises(ConfigurationError, match="no batch has the id 'x'"):
        await fleet.batches.get("x")
