"""A step whose first model is out: over a real Redis and real HTTP, on two protocols."""

from collections.abc import Iterator

import pytest
from support.runs.opened_runs import lease_runs_out
from support.runs.scripted_steps import Crash, Hands
from support.runs.stored_runs import bench

from stepfleet.orchestrator import Agent, RunStatus, tool
from stepfleet.orchestrator.events.envelope import EventType
from stepfleet.orchestrator.models.services import environment_of
from stepfleet.orchestrator.records.run.results import LostKind
from stepfleet.worker.testing import Fault, FaultKind, ModelServer, Reply, ToolCallReply, Usage

FIRST, SECOND = "anthropic:claude-a", "openai:gpt-b"
PRICES = {
    "claude-a": {"input": 100, "output": 1000},
    "gpt-b": {"input": 1, "output": 10},
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
