"""A step whose first model is out: over a real Redis and real HTTP, on two protocols."""

from collections import Counter
from collections.abc import Iterator
from decimal import Decimal

import pytest
from support.runs.opened_runs import lease_runs_out
from support.runs.scripted_steps import Crash, Hands, Script
from support.runs.stored_runs import bench

from stepfleet.orchestrator import (
    Agent,
    AsyncFleet,
    LLMResponse,
    ModelSettings,
    RunStatus,
    UsageStats,
    tool,
)
from stepfleet.orchestrator.events.envelope import EventType
from stepfleet.orchestrator.limits.estimates import FIRST_OUTPUT
from stepfleet.orchestrator.models.services import environment_of
from stepfleet.orchestrator.records.run.results import LostKind
from stepfleet.orchestrator.records.usage import CacheUse
from stepfleet.worker.testing.scenario import Fault, FaultKind, Reply, ToolCallReply, Usage
from stepfleet.worker.testing.server import ModelServer

FIRST, SECOND, SLOW = "anthropic:claude-a", "openai:gpt-b", "openai:gpt-x"
PRICES = {
    "claude-a": {"input": 100, "output": 1000},
    "gpt-b": {"input": 1, "output": 10},
    "gpt-x": {"input": 100, "output": 1000},
}


@tool(idempotent=True)
async def add(a: int, b: int) -> int:
    """Add."""
    return a + b


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModelServer, ModelServer]]:
    """Two servers: of the first model and of the second."""
    with ModelServer() as first, ModelServer() as second:
        for name, value in environment_of(second.url.removesuffix("/v1")).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("ANTHROPIC_BASE_URL", first.url.removesuffix("/v1"))
        for server in (first, second):
            server.follow({"hello": (Reply(tool_calls=(_ADDED,), usage=_USAGE), _FIVE)})
        yield first, second
        assert not first.violations
        assert not second.violations


_USAGE = Usage(prompt_tokens=1000, completion_tokens=100)
_ADDED = ToolCallReply("add", {"a": 2, "b": 3})
_FIVE = Reply("five", usage=_USAGE)


async def test_the_second_answers_once_priced_by_its_own_price_and_the_first_comes_back(
    redis_url: str, models: tuple[ModelServer, ModelServer]
) -> None:
    """What the first one may have charged is listed; a lost worker repeats no call."""
    first, second = models
    first.fail(Fault(FaultKind.RESET_MID_BODY), turn=1, attempt=None)
    agent = Agent("adder", model=[FIRST, SECOND], tools=[add], pricing=PRICES)
    async with bench(redis_url, agent, lease=600, grace=60) as desk:
        hands = Hands(desk, agent, crash_at="during-tool")
        run_id = await desk.create()
        with pytest.raises(Crash):
            await hands.step(run_id, 0)
        await lease_runs_out(desk, run_id)
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
        events, _ = await desk.runs.events(run_id)
        await hands.models.aclose()
    assert (result.output, result.status, result.error) == ("five", RunStatus.COMPLETED, None)
    assert (first.count("hello", 1), second.count("hello", 1), first.count("hello", 2)) == (1, 1, 1)
    one, two = result.steps
    assert one.fallback
    assert (one.fallback.model, one.model) == (SECOND, "gpt-b")
    assert (two.fallback, two.model) == (None, "claude-a")
    assert one.cost_usd == pytest.approx(0.002)
    assert two.cost_usd == pytest.approx(0.2)
    [lost] = [entry for entry in result.lost_attempts if entry.kind == LostKind.FAILED]
    assert lost.ambiguous
    assert lost.cost_usd == one.fallback.failed[0].cost_usd > 0.002
    done = [each["payload"] for each in events if each["type"] == EventType.STEP_COMPLETED]
    assert done[0]["fallback"]["failed"] == [{"model": FIRST, "code": "CONNECTION_ERROR"}]
    assert "fallback" not in done[1]
    assert f"{SECOND} answered in the place of {FIRST}" in result.explain()
    assert f"{SECOND} answered in the place of {FIRST}" in result.replay()


async def test_each_call_that_failed_has_its_own_line_under_its_own_model(
    redis_url: str, models: tuple[ModelServer, ModelServer]
) -> None:
    """COST-09: a broken answer, a timeout, an answer; the worker is lost in its tool."""
    first, second = models
    first.fail(Fault(FaultKind.RESET_MID_BODY), turn=1, attempt=None)
    second.fail(Fault(FaultKind.HANG), turn=1, attempt=1)
    listed = [FIRST, SLOW, SECOND]
    settings = ModelSettings(timeout=0.4)
    agent = Agent("adder", model=listed, tools=[add], pricing=PRICES, settings=settings)
    async with bench(redis_url, agent, lease=600, grace=60) as desk, AsyncFleet(redis_url) as fleet:
        hands = Hands(desk, agent, crash_at="during-tool")
        run_id = await desk.create()
        with pytest.raises(Crash):
            await hands.step(run_id, 0)
        before = {row.group["model"]: row for row in (await fleet.costs("model")).rows}
        await lease_runs_out(desk, run_id)
        await hands.finish(run_id)
        costs = await fleet.costs("model")
        lines = [line async for line in fleet.cost_lines(run_id)]
        await hands.models.aclose()
    assert {model: row.ambiguous_calls for model, row in before.items()} == {
        "claude-a": 1,
        "gpt-x": 1,
    }, "a run that is cancelled now has them too"
    rows = {row.group["model"]: row for row in costs.rows}
    made = Counter(one.model for server in models for one in server.requests)
    assert {name: one.calls + one.ambiguous_calls for name, one in rows.items()} == made
    out = Decimal(FIRST_OUTPUT)  # nobody knows how much it wrote
    assert out < rows["gpt-x"].ambiguous_tokens < out + 100
    assert out < rows["gpt-x"].ambiguous_usd * 1000 < out + 10, "at its own price"
    assert 0 < rows["claude-a"].ambiguous_usd == before["claude-a"].ambiguous_usd
    assert (rows["gpt-b"].usd, rows["claude-a"].usd) == (Decimal("0.002"), Decimal("0.2"))
    assert (costs.total.unpriced_calls, costs.total.lost_calls) == (0, 0)
    assert Counter(line.model for line in lines) == made
    for name, row in rows.items():
        usd = [line.usd for line in lines if line.model == name]
        assert sum(one for one in usd if one) == row.usd + row.ambiguous_usd


async def test_a_key_that_the_first_model_refuses_is_no_matter_for_the_second(
    redis_url: str, models: tuple[ModelServer, ModelServer]
) -> None:
    first, second = models
    first.fail(Fault(FaultKind.UNAUTHORIZED), attempt=None)
    agent = Agent("adder", model=[FIRST, SECOND], tools=[add])
    async with bench(redis_url, agent, lease=600, grace=60) as desk:
        run_id = await desk.create()
        hands = Hands(desk, agent)
        await hands.finish(run_id)
        await hands.models.aclose()
        result = (await desk.stored(run_id)).result()
    assert result.status is RunStatus.ERROR
    assert "ANTHROPIC_API_KEY" in str(result.error)
    assert not second.requests


async def test_a_lost_call_has_a_price_where_the_response_cache_answers_in_its_place(
    redis_url: str,
) -> None:
    hit = LLMResponse(content="five", cache=CacheUse(key="k", hit=True), usage=UsageStats())
    agent = Agent("adder", model=Script([hit]))
    async with bench(redis_url, agent, lease=600, grace=60) as desk, AsyncFleet(redis_url) as fleet:
        run_id = await desk.create()
        with pytest.raises(Crash):
            await Hands(desk, agent, crash_at="during-call").step(run_id, 0)
        await lease_runs_out(desk, run_id)
        await Hands(desk, agent).step(run_id, 0)
        total = (await fleet.costs()).total
    assert (total.cached_calls, total.ambiguous_calls, total.unpriced_calls) == (1, 1, 0)
    assert total.ambiguous_usd > 0
