"""A batch's failures by cause, and the retry of those that conditions select."""

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.runs.stored_runs import Bench, answered, called, failed, plain_agent
from support.workers.command_line import CommandLine

from stepfleet.orchestrator import AsyncFleet, ConfigurationError, ErrorInfo, ErrorPolicy, ErrorType
from stepfleet.orchestrator.batches import failures as counting
from stepfleet.orchestrator.client.fleet import AsyncBatch, store_of
from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.store.batches.batches import run_id_of

AGENT = plain_agent(max_steps=2, error_policy=ErrorPolicy.ignore_tool_errors())
BENCH: dict[str, Any] = {"agent": AGENT}
ROWS = 7
REFUSED, BROKEN, CANCELLED, COMPLETED, ENDLESS, OPEN = (0, 1), 2, 3, 4, 5, 6


async def refuse(desk: Bench, claim: Claim, message: str) -> None:
    error = ErrorInfo(type=ErrorType.MODEL, code="INVALID_REQUEST", message=message)
    await desk.commit(claim, replace(failed(claim), error=error))


async def ended_in_each_way(fleet: AsyncFleet, desk: Bench, key: str) -> AsyncBatch:
    """Return a batch with two refused runs, and one for each other constant above."""
    lines: list[dict[str, Any]] = [{"id": f"q{row}", "input": "hi"} for row in range(ROWS)]
    batch = await fleet.submit_batch(lines, AGENT, idempotency_key=key)
    for row in REFUSED:
        claim = await desk.claim(run_id_of(batch.id, row))
        await refuse(desk, claim, f"the host answered 400: row {row} is bad")
    for row in (BROKEN, ENDLESS):
        for step in (0, 1):
            claim = await desk.claim(run_id_of(batch.id, row), step)
            await desk.commit(claim, called(claim, error=row == BROKEN))
    await fleet.runs.cancel(run_id_of(batch.id, CANCELLED))
    claim = await desk.claim(run_id_of(batch.id, COMPLETED))
    await desk.commit(claim, answered(claim))
    return batch


async def reopened(fleet: AsyncFleet, batch: AsyncBatch) -> list[int]:
    """Return the rows that are active."""
    runs = [await fleet.runs.result(run_id_of(batch.id, row)) for row in range(ROWS)]
    return [row for row, run in enumerate(runs) if not run.lifecycle.is_terminal]


async def test_failures_are_grouped_by_cause_with_an_example(
    fleet: AsyncFleet, desk: Bench
) -> None:
    batch = await ended_in_each_way(fleet, desk, "a")
    found = await batch.failures()
    assert (found.not_completed, found.read, found.ungrouped) == (5, 5, 0)
    causes = {str(group.cause): group for group in found.groups}
    assert {cause: group.runs for cause, group in causes.items()} == {
        "model error (INVALID_REQUEST): the host answered 400: row # is bad": 2,
        "tool error (TOOL_EXECUTION_ERROR): broken": 1,
        "steps_limit, without an error": 1,
        "user_requested, without an error": 1,
    }
    refused = found.groups[0]
    assert refused.example.line_id == "q0"
    assert refused.example.text == "the host answered 400: row 0 is bad"
    assert (refused.steps, refused.models) == ({1: 2}, {"openai:none": 2})
    assert causes["tool error (TOOL_EXECUTION_ERROR): broken"].limits == {"max_steps": 4}


async def test_a_stored_result_and_the_scan_agree_on_the_cause(
    fleet: AsyncFleet, desk: Bench
) -> None:
    batch = await ended_in_each_way(fleet, desk, "a")
    results = [result async for result in batch.results(follow=False, failed=True)]
    store = await store_of(fleet)
    scanned = await store.runs.failed([result.run_id for result in results])
    seen = [counting.failure_of(result) for result in results]
    assert [one.model_copy(update={"limits": {}}) for one in scanned] == seen
    last = (await fleet.runs.result(run_id_of(batch.id, BROKEN))).last_error
    assert last is not None
    assert (last.failed_steps, last.steps, last.message) == (2, 2, "broken")


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ("error~ANSWERED 400", [*REFUSED]),
        ("error~row 1", [1]),
        ("code=INVALID_REQUEST,step=1", [*REFUSED]),
        ("stop_reason=steps_limit", [BROKEN, ENDLESS]),
        ("stop_reason=max_steps,error=broken", [BROKEN]),
        ("stop_reason=user_requested", [CANCELLED]),
        ("step=0", []),
        ("model=openai:none", [*REFUSED, BROKEN, ENDLESS]),
    ],
)
async def test_a_retry_takes_just_the_runs_that_its_conditions_select(
    fleet: AsyncFleet, desk: Bench, where: str, rows: list[int]
) -> None:
    batch = await ended_in_each_way(fleet, desk, "a")
    assert await batch.retry(where=where, max_steps=4) == len(rows)
    assert await reopened(fleet, batch) == sorted([*rows, OPEN])


async def test_each_group_is_retried_by_its_own_condition(fleet: AsyncFleet, desk: Bench) -> None:
    batch = await ended_in_each_way(fleet, desk, "a")
    for group in (await batch.failures()).groups:
        assert await batch.retry(where=group.where, **group.limits) == group.runs  # type: ignore[arg-type]  # limits are overrides by name
    assert (await batch.failures()).read == 0


async def test_a_further_message_leaves_the_errors_of_the_time_before_behind(
    fleet: AsyncFleet, desk: Bench
) -> None:
    batch = await ended_in_each_way(fleet, desk, "a")
    run_id = run_id_of(batch.id, BROKEN)
    await fleet.runs.send(run_id, "go on")
    await fleet.runs.cancel(run_id)
    assert (await fleet.runs.result(run_id)).last_error is None
    await fleet.runs.send(run_id, "go on")
    for step in (2, 3):
        claim = await desk.claim(run_id, step)
        await desk.commit(claim, called(claim))
    result = await fleet.runs.result(run_id)
    assert (result.stop_reason, result.last_error) == ("steps_limit", None)
    scanned = await batch.failures()
    assert scanned.groups[1].cause.kind == "steps_limit"
    assert scanned.groups[1].runs == 2


async def test_the_scan_reads_no_completed_run_and_stops_at_its_limit(
    fleet: AsyncFleet, desk: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "ROWS", 2)
    batch = await ended_in_each_way(fleet, desk, "a")
    connection = desk.opened.connection
    await connection.execute("CONFIG", "RESETSTAT")
    rows: list[int] = []
    assert (await batch.failures(rows.append)).read == 5
    assert rows == [2, 4, 6, 7]
    used = await connection.execute("INFO", "commandstats")
    assert used["cmdstat_hmget"]["calls"] == 5 + 4, "a header each, a log where there are steps"
    assert (await batch.failures(limit=1)).read == 2


async def test_a_line_is_found_in_its_batch_and_in_the_newest_one(
    fleet: AsyncFleet, desk: Bench
) -> None:
    older = await ended_in_each_way(fleet, desk, "a")
    newer = await fleet.submit_batch(
        [{"id": "q1", "input": "hi"}, {"id": "é", "input": "hi"}], AGENT
    )
    run_id = run_id_of(older.id, 1)
    assert await fleet.runs.find(run_id) == run_id
    assert await fleet.runs.find("q1", older.id) == run_id
    assert await fleet.runs.find("q1") == run_id_of(newer.id, 0)
    assert await fleet.runs.find("é") == run_id_of(newer.id, 1)
    assert await fleet.runs.find("q6") == run_id_of(older.id, OPEN)
    await ended_in_each_way(fleet, desk, "b")
    await fleet.submit_batch([{"id": "new", "input": "hi"}], AGENT)
    with pytest.raises(ConfigurationError, match="several batches have a line 'q6'") as refused:
        await fleet.runs.find("q6")
    assert run_id_of(older.id, OPEN) in str(refused.value)
    for text in ("q9", "", "\udcff"):
        with pytest.raises(ConfigurationError, match="id"):
            await fleet.runs.find(text)
    with pytest.raises(ConfigurationError, match=f"no line of batch {older.id} has the id 'q9'"):
        await fleet.runs.find("q9", older.id)


async def test_the_command_line_groups_and_retries_just_these(
    fleet: AsyncFleet, desk: Bench, tmp_path: Path, redis_url: str
) -> None:
    batch = await ended_in_each_way(fleet, desk, "a")
    commands = CommandLine(tmp_path, STEPFLEET_REDIS_URL=redis_url)

    async def said(*words: str, code: int = 0, columns: str = "200") -> str:
        done = await asyncio.to_thread(partial(commands, *words, COLUMNS=columns))
        assert done.returncode == code, done.stdout + done.stderr
        return str(done.stdout + done.stderr)

    status = await said("status", batch.id)
    assert "2  model error (INVALID_REQUEST): the host answered 400: row # is bad" in status
    assert f"stepfleet failures {batch.id}" in status
    causes = orjson.loads(await said("status", batch.id, "--json"))["causes"]
    assert [one["runs"] for one in causes] == [2, 1, 1]
    shown = await said("failures", batch.id, code=1, columns="40")
    assert "5 runs did not complete, 5 were read, 4 causes" in shown
    assert "e.g. line q0, run" in shown
    found = orjson.loads(await said("failures", batch.id, "--json", code=1))["groups"]
    assert [group["retry"] in shown for group in found] == [True] * 4
    newest = orjson.loads(await said("failures", "--json", code=1))
    causes = {group["cause"]["key"]: group["runs"] for group in found}
    for group in newest["groups"]:
        assert group["runs"] == causes[group["cause"]["key"]]
        listed = orjson.loads(await said(*group["list"].split()[1:], "--json"))
        assert len(listed["runs"]) == group["runs"]
    assert "Newest runs of the fleet: " in await said("failures", code=1)
    (broken,) = (group for group in found if group["cause"]["text"] == "broken")
    assert "retry of 1 run." in await said(*broken["retry"].split()[1:])
    assert await reopened(fleet, batch) == [BROKEN, OPEN]
    assert "nothing to retry" in await said(*broken["retry"].split()[1:])
    explained = await said("explain", "q1", "--batch", batch.id)
    assert "Cause: model error (INVALID_REQUEST) in step 1: the host answered 400" in explained
    assert f"Line q1 of batch {batch.id}" in explained
    assert "is retried at step 1" in await said("retry", "q1")
    assert "there is no field 'color'" in await said(
        "retry", "--batch", batch.id, "--where", "color=red", code=2
    )
    assert "for a batch" in await said("retry", "q0", "--where", "tool=a", code=2)


async def test_a_retry_takes_the_costs_of_failed_steps_back_from_who_pays_for_them(
    fleet: AsyncFleet, desk: Bench
) -> None:
    """COST-14: the step is paid once it is done again, by its tenant and batch."""
    agent = plain_agent(error_policy=ErrorPolicy.stop_on_any_error())
    lines = [{"id": f"q{row}", "input": "hi", "tenant": "acme"} for row in range(3)]
    batch = await fleet.submit_batch(lines, agent)
    for run_id in batch.run_ids():
        claim = await desk.claim(run_id)
        await desk.commit(claim, called(claim, error=True))

    async def calls() -> dict[tuple[str, str], int]:
        found = await fleet.costs(by=["tenant", "batch"])
        return {(row.group["tenant"], row.group["batch"]): row.calls for row in found.rows}

    before = await calls()
    assert before == {("acme", batch.id): 3}
    assert await batch.retry() == 3
    assert {one: count for one, count in (await calls()).items() if count} == {}
    for run_id in batch.run_ids():
        claim = await desk.claim(run_id)
        await desk.commit(claim, answered(claim))
    assert await calls() == before
