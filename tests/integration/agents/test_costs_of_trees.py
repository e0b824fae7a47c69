"""What a run and all below it have cost: in its result, in theirs, and once in the ledger."""

from typing import Any

import pytest
from support.runs.scripted_steps import Crash, Hands, Script, call, say
from support.runs.stored_runs import bench

from stepfleet.orchestrator import (
    Agent,
    AgentRunResult,
    AsyncFleet,
    ErrorPolicy,
    LLMResponse,
    ModelRequest,
    StopReason,
    tool,
)
from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store.batches.batches import run_id_of
from stepfleet.worker.runtime.inline import InlineWorker

CALL_TOKENS = 15
LENIENT = ErrorPolicy.ignore_tool_errors()


def priced(name: str, script: Script, price: float, **config: Any) -> Agent:
    """Return an agent whose calls cost `price` USD for a million tokens."""
    prices = {"input": price, "output": price}
    return Agent(name, model=script, pricing=prices, time_limit=None, **config)


def usd(calls: int, price: float) -> float:
    return calls * CALL_TOKENS * price / 1_000_000


async def below(fleet: AsyncFleet, result: AgentRunResult) -> list[AgentRunResult]:
    """Return the results of all runs below one."""
    found = []
    for step in result.steps:
        for end in step.runs:
            found.append(await fleet.runs.result(end.run_id))
            found += await below(fleet, found[-1])
    return found


async def calls_by_agent(fleet: AsyncFleet, batch_id: str) -> dict[str, int]:
    rows = (await fleet.costs("agent", batch=batch_id)).rows
    return {row.group["agent"]: row.calls for row in rows}


async def test_a_retry_adds_what_is_new_and_nothing_twice(
    fleet: AsyncFleet, redis_url: str
) -> None:
    """COST-14, MULTI-04: also of grandchildren; a child that ended well is not repeated."""
    failing = [True]

    async def check(request: ModelRequest) -> LLMResponse:
        if failing[0] and request.messages[-1].text == "b":
            raise ModelError("refused", retryable=False)
        return say("fine")

    async def ask_checker(request: ModelRequest) -> LLMResponse:
        return call(("checker", {"input": request.messages[-1].text}))

    checking = Script([check])
    checker = priced("checker", checking, 1.0)
    strict = {"error_policy": ErrorPolicy.stop_on_any_error()}
    asking = Script([ask_checker, say("found")])
    researcher = priced("researcher", asking, 10.0, agents=[checker], **strict)
    both = call(("researcher", {"input": "a"}), ("researcher", {"input": "b"}))
    joining = Script([both, say("joined")])
    given = {"agents": [researcher], "parallel_tool_execution": True, **strict}
    editor = priced("editor", joining, 100.0, **given)
    batch = await fleet.submit_batch([{"input": "write"}], editor)
    run_id = run_id_of(batch.id, 0)
    async with InlineWorker(load_settings(redis_url=redis_url), [editor]) as worker:
        await worker.finish(run_id)
        failed = await fleet.runs.result(run_id)
        assert not failed.success
        ends = [one.run and one.run.status for one in failed.steps[0].tool_calls]
        assert ends == ["completed", "error"]
        assert await calls_by_agent(fleet, batch.id) == {
            "editor": 1,
            "researcher": 3,
            "checker": 1,
        }
        failing[0] = False
        await fleet.runs.retry(run_id)
        await worker.finish(run_id)
    result = await fleet.runs.result(run_id)
    assert (result.success, result.output) == (True, "joined")
    runs = await below(fleet, result)
    assert sorted(one.agent_name for one in runs) == ["checker"] * 2 + ["researcher"] * 2
    first = next(one for one in runs if one.agent_name == "researcher")
    assert first.below_cost_usd == pytest.approx(usd(1, 1.0))
    assert first.total_cost_usd == pytest.approx(usd(2, 10.0) + usd(1, 1.0))
    assert result.below_cost_usd == pytest.approx(sum(one.cost_usd for one in runs))
    assert result.total_usage.total_tokens == result.usage.total_tokens + sum(
        one.usage.total_tokens for one in runs
    )
    sent = {"editor": len(joining.requests), "researcher": len(asking.requests), "checker": 2}
    assert sent == {"editor": 2, "researcher": 4, "checker": 2}
    assert [one.messages[-1].text for one in checking.requests] == ["a", "b", "b"]
    assert await calls_by_agent(fleet, batch.id) == sent
    total = (await fleet.costs(batch=batch.id)).total.usd
    assert float(total or 0) == pytest.approx(result.total_cost_usd)
    assert result.total_cost_usd == pytest.approx(usd(2, 100.0) + usd(4, 10.0) + usd(2, 1.0))


async def test_a_run_below_that_kills_its_workers_is_paid_for_once(
    fleet: AsyncFleet, redis_url: str
) -> None:
    """COST-14: its caller reads the failure; the answer that was lost with it is in the ledger."""

    @tool(read_only=True)
    def bomb() -> str:
        """Explode."""
        return "not reached"

    child = priced("researcher", Script([call(("bomb", {}))]), 10.0, tools=[bomb])
    asking = Script([call(("researcher", {"input": "a"})), say("without it")])
    editor = priced("editor", asking, 100.0, agents=[child], error_policy=LENIENT)
    batch = await fleet.submit_batch([{"input": "write"}], editor)
    run_id = run_id_of(batch.id, 0)
    async with (
        InlineWorker(load_settings(redis_url=redis_url), [editor]) as worker,
        bench(redis_url, child) as desk,
    ):
        await worker._worker.run(Work(run_id, 0))
        await worker._worker.run(Work(run_id, 0, 0))
        (started,) = (await fleet.runs.page(parent=run_id)).runs
        for _ in range(3):
            with pytest.raises(Crash):
                await Hands(desk, child, crash_at="tool-started").step(started.run_id, 0)
            assert await desk.marks.child_died(Work(started.run_id, 0), "test")
        await worker.finish(run_id)
    result = await fleet.runs.result(run_id)
    assert (result.success, result.output) == (True, "without it")
    (made,) = result.steps[0].tool_calls
    assert made.error is not None
    assert made.error.code == "RUN_FAILED"
    ended = await fleet.runs.result(started.run_id)
    assert ended.stop_reason is StopReason.ERROR
    assert ended.outcome is not None
    assert ended.outcome.resolved_by == "PoisonLimit"
    assert sum(one.cost_usd or 0 for one in ended.lost_attempts) == pytest.approx(usd(1, 10.0))
    assert await calls_by_agent(fleet, batch.id) == {"editor": 2, "researcher": 1}
    total = (await fleet.costs(batch=batch.id)).total
    assert float(total.committed_usd or 0) == pytest.approx(result.total_cost_usd)
    assert float(total.lost_usd or 0) == pytest.approx(usd(1, 10.0))
