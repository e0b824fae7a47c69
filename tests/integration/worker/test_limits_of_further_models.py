"""Limits and budgets of models that a step calls behind its first: fallbacks, and for summaries."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from stepfleet.orchestrator import (
    Agent,
    AsyncFleet,
    Costs,
    LimitUse,
    LLMResponse,
    MemoryPolicy,
    Middleware,
    ModelSettings,
    RunStatus,
    tool,
)
from stepfleet.orchestrator.models.services import environment_of
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.worker.runtime.inline import InlineWorker
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Fault, Reply, ToolCallReply, Usage
from stepfleet.worker.testing.server import ModelServer

FIRST, SECOND = "anthropic:first", "openai:second"
TENANT = "tenant:acme"
TOKENS = Usage(15, 5)
ONE = Decimal("0.002")
"""What a call of the second model costs; one of the first costs ten times as much."""
PRICES = {
    "anthropic": {"first": {"input": 1000, "output": 1000}},
    "openai": {name: {"input": 100, "output": 100} for name in ("second", "small")},
}


def answers(_: RequestRecord) -> Reply:
    return Reply("done", latency=0.02, usage=TOKENS)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[ModelServer]]:
    """A server of the first model and one of the others, with prices."""
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps(PRICES))
    monkeypatch.setenv("STEPFLEET_PRICING_CONFIG", str(prices))
    with ModelServer(answers) as first, ModelServer(answers) as second:
        for name, value in environment_of(second.url.removesuffix("/v1")).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("ANTHROPIC_BASE_URL", first.url.removesuffix("/v1"))
        yield [first, second]


@asynccontextmanager
async def working(
    url: str, agent: Agent, limits: dict[str, Any]
) -> AsyncIterator[tuple[AsyncFleet, InlineWorker]]:
    settings = load_settings(redis_url=url, limits=limits, circuit_after=0)
    async with AsyncFleet(settings=settings) as fleet, InlineWorker(settings, [agent]) as worker:
        yield fleet, worker


async def uses(fleet: AsyncFleet) -> dict[str, LimitUse]:
    return {one.name: one for one in await fleet.limits.use()}


def spent(use: LimitUse, field: str = "calls") -> Decimal:
    [found] = [one.spent for one in use.budgets if one.field == field]
    return found


async def runs_of(fleet: AsyncFleet, worker: InlineWorker, agent: Agent, count: int) -> list[Any]:
    ids = [await fleet.submit(agent, f"question {n}", tenant="acme") for n in range(count)]
    await worker.finish(*ids)
    return [await fleet.runs.result(run_id) for run_id in ids]


def made(costs: Costs) -> int:
    total = costs.total
    return total.calls + total.ambiguous_calls


async def test_a_call_that_failed_before_another_model_refused_is_spent(
    redis_url: str, servers: list[ModelServer]
) -> None:
    """The first may have been paid for each time: the budget ends what would have no end."""
    first, second = servers
    first.fail(Fault("hang"), attempt=None)
    second.fail(Fault("rate_limited", retry_after=0.1), attempt=None)
    agent = Agent("listed", model=[FIRST, SECOND], settings=ModelSettings(timeout=0.3))
    async with working(redis_url, agent, {TENANT: {"calls": 5}}) as (fleet, worker):
        async with asyncio.timeout(60):
            results = await runs_of(fleet, worker, agent, 8)
        use, costs = (await uses(fleet))[TENANT], await fleet.costs()
    assert {one.stop_reason for one in results} == {"guard"}
    assert spent(use) == len(first.requests) == made(costs) == 5
    assert not use.budgets[0].reserved


@pytest.mark.parametrize("more", [{}, {TENANT: {"calls": 1000, "requests_per_minute": 60_000}}])
async def test_a_fallback_is_called_within_its_own_budget_alone(
    redis_url: str, servers: list[ModelServer], more: dict[str, Any]
) -> None:
    first, second = servers
    first.fail(Fault("server_error"), attempt=None)
    agent = Agent("listed", model=[FIRST, SECOND], model_attempts=1)
    limits = {SECOND: {"calls": 5, "requests_per_minute": 6000}, **more}
    async with working(redis_url, agent, limits) as (fleet, worker):
        results = await runs_of(fleet, worker, agent, 12)
        known = await uses(fleet)
    assert len(second.requests) == 5 == spent(known[SECOND])
    assert [one.output for one in results].count("done") == 5
    assert known[SECOND].levels["requests_per_minute"] > 0
    refused = [one for one in results if one.status is RunStatus.ERROR]
    assert len(refused) == 7
    assert all("calls of openai:second" in str(one.error) for one in refused), "it names the fix"
    for name in more:
        assert spent(known[name]) == 5
        assert known[name].in_flight == 0


async def test_a_fallback_waits_for_room_under_its_own_limit(
    redis_url: str, servers: list[ModelServer]
) -> None:
    """It takes no slot of the first meanwhile, and each call is made once."""
    first, second = servers
    first.fail(Fault("server_error"), attempt=None)
    agent = Agent("listed", model=[FIRST, SECOND], model_attempts=2)
    limits = {FIRST: {"in_flight": 4}, SECOND: {"in_flight": 1}}
    async with working(redis_url, agent, limits) as (fleet, worker):
        async with asyncio.timeout(90):
            results = await runs_of(fleet, worker, agent, 4)
        known = await uses(fleet)
    assert [one.output for one in results] == ["done"] * 4
    assert second.log.most_in_flight == 1
    assert len(second.requests) == 4
    assert (known[FIRST].in_flight, known[SECOND].in_flight) == (0, 0)


async def test_each_model_is_charged_with_its_own_calls(
    redis_url: str, servers: list[ModelServer]
) -> None:
    """A broken answer of the first is spent of its budget, and not of the one that answered."""
    first, second = servers
    first.fail(Fault("reset_mid_body"), attempt=None)
    agent = Agent("listed", model=[FIRST, SECOND])
    limits = {name: {"calls": 50, "usd": 10} for name in (FIRST, SECOND, TENANT)}
    async with working(redis_url, agent, limits) as (fleet, worker):
        await runs_of(fleet, worker, agent, 3)
        known = await uses(fleet)
        rows = {row.group["model"]: row for row in (await fleet.costs("model")).rows}
    assert [spent(known[name]) for name in (FIRST, SECOND, TENANT)] == [3, 3, 6]
    assert spent(known[SECOND], "usd") == rows["second"].usd == 3 * ONE
    assert spent(known[FIRST], "usd") == rows["first"].ambiguous_usd > 0
    assert spent(known[TENANT], "usd") == rows["second"].usd + rows["first"].ambiguous_usd
    assert len(second.requests) == 3


@tool
async def look(what: str) -> str:
    """Look."""
    return f"saw {what}"


def looking(request: RequestRecord) -> Reply:
    if request.number < 5 and request.model == "first":
        return Reply(tool_calls=(ToolCallReply("look", {"what": "it"}),), usage=TOKENS)
    return Reply("done", usage=TOKENS)


async def test_a_summary_is_charged_to_the_model_that_makes_it(
    redis_url: str, servers: list[ModelServer]
) -> None:
    first, second = servers
    for server in servers:
        server.follow(looking)
    memory = MemoryPolicy(summarize_after=4, summary_model="openai:small")
    agent = Agent("long", model=FIRST, tools=[look], memory=memory)
    limits = {name: {"calls": 50, "usd": 10} for name in (FIRST, "openai:small", TENANT)}
    async with working(redis_url, agent, limits) as (fleet, worker):
        [result] = await runs_of(fleet, worker, agent, 1)
        known, costs = await uses(fleet), await fleet.costs()
    assert result.output == "done"
    assert len(second.requests) >= 1, "a summary was made"
    assert spent(known["openai:small"]) == len(second.requests)
    assert spent(known[FIRST]) == len(first.requests)
    assert spent(known[TENANT]) == len(first.requests) + len(second.requests) == made(costs)
    assert spent(known["openai:small"], "usd") == ONE * len(second.requests)
    assert spent(known[TENANT], "usd") == costs.total.usd
    assert not any(one.in_flight for one in known.values())


class Strict(Middleware):
    """Refuses each answer."""

    async def around_model(self, request: Any, call_next: Any) -> LLMResponse:
        await call_next(request)
        msg = "not good enough"
        raise ValueError(msg)


class Patient(Middleware):
    """Asks twice, and takes the second answer."""

    async def around_model(self, request: Any, call_next: Any) -> LLMResponse:
        await call_next(request)
        answer: LLMResponse = await call_next(request)
        return answer


@pytest.mark.parametrize("layer", [Strict(), Patient()])
async def test_paid_answers_that_middleware_does_not_use_are_in_the_ledger(
    redis_url: str, servers: list[ModelServer], layer: Middleware
) -> None:
    agent = Agent("strict", model=SECOND, middleware=[layer])
    async with working(redis_url, agent, {TENANT: {"calls": 50, "usd": 1}}) as (fleet, worker):
        await runs_of(fleet, worker, agent, 3)
        use, total = (await uses(fleet))[TENANT], (await fleet.costs()).total
    calls = len(servers[1].requests)
    assert calls >= 3
    assert spent(use) == total.calls == calls
    assert spent(use, "usd") == total.usd == ONE * calls
    assert total.lost_calls == 3


async def test_empty_summaries_are_in_the_ledger(
    redis_url: str, servers: list[ModelServer]
) -> None:
    first, second = servers
    first.follow(looking)
    second.follow(lambda _: Reply("", usage=TOKENS))
    memory = MemoryPolicy(summarize_after=4, summary_model="openai:small")
    agent = Agent("long", model=FIRST, tools=[look], memory=memory)
    async with working(redis_url, agent, {TENANT: {"calls": 50, "usd": 10}}) as (fleet, worker):
        await runs_of(fleet, worker, agent, 2)
        use, costs = (await uses(fleet))[TENANT], await fleet.costs()
    assert second.requests
    assert made(costs) == len(first.requests) + len(second.requests) == spent(use)


async def test_timed_out_calls_before_one_that_is_held_back_are_in_the_ledger(
    redis_url: str, servers: list[ModelServer]
) -> None:
    """The second model has just refused others: this call is not sent, and the step is released."""
    first, second = servers
    first.fail(Fault("hang"), attempt=None)
    second.fail(Fault("rate_limited", retry_after=1.0), attempt=1)
    agent = Agent("listed", model=[FIRST, SECOND], settings=ModelSettings(timeout=0.3))
    async with working(redis_url, agent, {}) as (fleet, worker):
        async with asyncio.timeout(90):
            await runs_of(fleet, worker, agent, 6)
        costs = await fleet.costs("model")
    rows = {row.group["model"]: row for row in costs.rows}
    assert rows["first"].ambiguous_calls == len(first.requests)
    assert costs.total.unpriced_calls == 0
